"""The target model: what is known of it without loading it, and how it is loaded and tapped.

================  ====================================================================================
``facts.py``      ``facts``: sizes, rotary embedding, special tokens, from config.json and headers
``weights.py``    names and shapes in the checkpoint; ``load_embedding_and_head``
``tokens.py``     ``load_tokenizer``; ``resolve_mask_token_id``
``load.py``       ``load_target``: layers up to the last tap, straight to the device
``packed.py``     rows one after another without padding: attention for them, and whether a target allows it
``merged.py``     one product for projections of the same input, in compiled layers
``taps.py``       ``Target``: hooks on the tapped layers, ``capture``
``ending.py``     ``load_ending``: final norm, scale and cap of the logits, for training towards the target
================  ====================================================================================
"""

from dflash_offline.target.ending import Ending, load_ending
from dflash_offline.target.facts import TargetFacts, facts
from dflash_offline.target.load import load_target
from dflash_offline.target.packed import packing_obstacle
from dflash_offline.target.taps import Target
from dflash_offline.target.tokens import load_tokenizer, resolve_mask_token_id
from dflash_offline.target.weights import find_embedding, is_tied, load_embedding_and_head, stored_tensors

__all__ = [
    "Ending",
    "Target",
    "TargetFacts",
    "facts",
    "find_embedding",
    "is_tied",
    "load_embedding_and_head",
    "load_ending",
    "load_target",
    "load_tokenizer",
    "packing_obstacle",
    "resolve_mask_token_id",
    "stored_tensors",
]
