"""Block attention: the rule, and the paths that compute it.

========================  =======================================================================================
``blocks.py``             :class:`BlockLayout` (blocks as intervals of the context axis) and the rule as a dense mask
``dense.py``              ``eager`` (reference) and ``sdpa`` (CPU)
``flex.py``               ``flex``: compiled block-sparse flex_attention
``intervals.py``          ``triton``: kernels that know a block as an interval (``interval_kernels.py``)
``select.py``             paths by name
``proof.py``              the check at every start that a path is right and not dense in disguise
========================  =======================================================================================

A path is an object with ``plan(blocks, window)``, made once per micro-batch and window, and
``attend(query, context_key, context_value, block_key, block_value, plan)``.
"""

from dflash_offline.attention.blocks import BlockLayout, dense_mask
from dflash_offline.attention.dense import EagerAttention, SdpaAttention
from dflash_offline.attention.proof import Proof, prove
from dflash_offline.attention.select import Attention, choose_attention, make_attention

__all__ = [
    "Attention",
    "BlockLayout",
    "EagerAttention",
    "Proof",
    "SdpaAttention",
    "choose_attention",
    "dense_mask",
    "make_attention",
    "prove",
]
