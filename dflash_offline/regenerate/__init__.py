"""The target writes the answers: prompts -> conversations that the corpus is made of.

In reading order:

- ``prompts``         prompt files of any format -> turns to ask
- ``parts``           the folder of a regeneration: plan, journals, finished parts, manifest
- ``work``            what one process holds of it: conversations, leases, counts
- ``asking``          the server back end: threads that ask; ``servers`` spreads, retries and keeps the key
- ``local``           the transformers back end: the target loaded here
- ``decoding``        hundreds of rows in buffers of fixed shape, steps recorded as CUDA graphs; ``row_attention`` and its
  Triton kernel ``row_kernel``; ``drawing`` chooses tokens; ``generating`` is the slow way for other targets
- ``run``             one process from plan to manifest

``python -m dflash_offline.regenerate`` is the stage. What is answered is in a journal at once and is never asked again.
"""

from dflash_offline.regenerate.parts import answer_files, is_answered
from dflash_offline.regenerate.prompts import Prompt, parse_turns, prompt_files
from dflash_offline.regenerate.run import regenerate

__all__ = ["Prompt", "answer_files", "is_answered", "parse_turns", "prompt_files", "regenerate"]
