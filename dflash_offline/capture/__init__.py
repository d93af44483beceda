"""Phase 1: the target's hidden states of every row of the corpus, written to the store.

One replica is one process with one copy of the target: ``python -m dflash_offline.capture --config FILE``. Replicas
know nothing of each other; they meet at the lease files and at the manifests of committed parts.

================  ====================================================================================
``replica.py``    what one replica does: claim a part, run its batches, commit it, until none is left
``forward.py``    batches of rows -> tapped hidden states: padding, compiled layers, out of memory
``checks.py``     taps against transformers' own hidden states, before anything is written
``statistics.py`` channel statistics of int codecs, measured once per store
``job.py``        one part on its way to the disk, in a thread, so that the GPU never waits for it
``__main__.py``   the stage
================  ====================================================================================
"""

from dflash_offline.capture.checks import check_padding, check_taps
from dflash_offline.capture.forward import Forwarder
from dflash_offline.capture.replica import Replica

__all__ = ["Forwarder", "Replica", "check_padding", "check_taps"]
