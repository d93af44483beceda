"""Watching a run: what its processes and machines tell, and how that is shown while it goes on.

``gpus``     memory and utilisation of this machine's GPUs, by NVML or ``nvidia-smi``
``hosts``    a small file per host under ``logs/hosts/``, from which other hosts see its GPUs
``metrics``  the rows of a growing ``metrics.jsonl``
``lines``    progress files -> lines with bars, for a terminal
``region``   lines that stay at the bottom of a terminal while others scroll above them
``display``  the process that owns the terminal while a command runs: ``python -m dflash_offline.watch``
"""
