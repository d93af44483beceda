"""The command ``dflash-offline``. Nothing heavier than click is imported before a command runs.

``group``       errors in one line, "did you mean"          ``options``    --config, --json, tables
``starting``    init, smoke                                 ``planning``   plan, doctor
``training``    train --partial                             ``sampling``   export-sample
``following``   status, report                              ``inspecting`` inspect, stats, verify, diff
``results``     export, evaluate, generate                  ``showing``    show
``tidying``     reset, prune
"""

from dflash_offline.cli.group import main

__all__ = ["main"]
