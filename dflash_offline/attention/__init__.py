"""Block attention: the rule, and the paths that compute it.

========================  =======================================================================================
``blocks.py``             :class:`BlockLayout` (blocks as intervals of the context axis) and the rule as a dense mask
``dense.py``              ``eager`` (reference) and ``sdpa`` (CPU)
``flex.py``               ``flex``: compiled block-sparse flex_attention
``select.py``             paths by name
========================  =======================================================================================

A path is an object with ``plan(blocks, window)``, made once per micro-batch and window, and
``attend(query, context_key, context_value, block_key, block_value, plan)``.
"""

from dflash_offline.attention.blocks import BlockLayout, dense_mask
from dflash_offline.attention.dense import EagerAttention, SdpaAttention
from dflash_offline.attention.select import Attention, make_attention

__all__ = ["Attention", "BlockLayout", "EagerAttention", "SdpaAttention", "dense_mask", "make_attention"]
