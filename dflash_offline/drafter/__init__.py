"""The drafter.

========================  =======================================================================================
``shape.py``              :class:`DrafterShape`: sizes, taps, windows, rotation; made from a target's facts
``model.py``              :class:`Drafter`: training pass, and drafting step by step with a cache
========================  =======================================================================================
"""

from dflash_offline.drafter.model import DraftCache, Drafter
from dflash_offline.drafter.shape import DrafterShape, check_sizes, planned_shape, rope_of_target, rotary_frequencies

__all__ = ["DraftCache", "Drafter", "DrafterShape", "check_sizes", "planned_shape", "rope_of_target", "rotary_frequencies"]
