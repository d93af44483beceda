"""Does the drafter accept? A real draft-and-verify loop on the real target, and the replay of held-out rows.

==================  ==================================================================================
``prompts.py``      prompts -> token ids: the chat template (``dflash_offline.prompts`` reads the files)
``target_steps.py`` ``SteppedTarget``: the target with a KV cache that can be put back
``sampling.py``     which drafted tokens are accepted: greedy, or the exact rejection rule
``decoder.py``      ``Decoder``: the loop (``stream``, ``generate``) and the target alone (``generate_plain``)
``rows.py``         target and drafter over several sequences, buffers of fixed shape
``batched.py``      ``BatchedDecoder``: the loop over several sequences, recorded as CUDA graphs
``comparison.py``   is the output the target's own; near-ties
``loading.py``      target folder + drafter -> ``Decoder``
``run.py``          ``Loop``: a queue of prompts, at once or one by one; conversations turn by turn, a data set
``heldout.py``      ``tau_replay`` beside the real loop
``summary.py``      acceptance length, intervals, tables
``stage.py``        ``python -m dflash_offline.evaluate``; ``evaluate_folder`` for an exported drafter
``generation.py``   ``generate``: streamed text with accepted runs marked
==================  ==================================================================================
"""

from dflash_offline.evaluate.batched import BatchedDecoder
from dflash_offline.evaluate.comparison import Comparison, compare
from dflash_offline.evaluate.decoder import Decoder, Emission, Response
from dflash_offline.evaluate.generation import TextRun, generate
from dflash_offline.evaluate.loading import load_decoder, make_drafter
from dflash_offline.evaluate.run import Loop
from dflash_offline.evaluate.stage import evaluate, evaluate_folder
from dflash_offline.evaluate.target_steps import SteppedTarget
from dflash_offline.prompts import Prompt, dataset_name, read_prompts

__all__ = [
    "BatchedDecoder",
    "Comparison",
    "Decoder",
    "Emission",
    "Loop",
    "Prompt",
    "Response",
    "SteppedTarget",
    "TextRun",
    "compare",
    "dataset_name",
    "evaluate",
    "evaluate_folder",
    "generate",
    "load_decoder",
    "make_drafter",
    "read_prompts",
]
