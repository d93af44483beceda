"""Is this machine fit for the run? Each check says what it found and, where something is amiss, what to do.

``check``          one line of the answer
``software``       Python, packages, torch's build, driver, NCCL, Triton, compiler, compile cache
``machine``        GPUs, the target's folder, drafters, memory, limits of the shell
``conversations``  tokenizer, chat template, the files, whether a row of them can be used
``storage``        disk: kind, space, locks, clock, measured rates
``hosts``          the hosts that the run file names
``scheduler``      luigid
"""

from dflash_offline.doctor.check import Check, examine

__all__ = ["Check", "examine"]
