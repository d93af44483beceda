"""The run file: ``run.toml`` -> ``RunConfig``.

Every field carries its documentation, so that ``dflash-offline init`` and the reference page are made from these
modules. Unknown keys are refused with the nearest known one; paths are relative to the run file; nothing is read
from the environment. Which fields make up which stage's content key is said in ``keys.py``, not here.

One module a section; ``run.py`` puts them together and refuses settings that clash.
"""

from dflash_offline.config.corpus import CorpusConfig
from dflash_offline.config.drafter import DrafterConfig
from dflash_offline.config.hosts import HostConfig, same_host
from dflash_offline.config.regenerate import RegenerateConfig
from dflash_offline.config.results import EvaluateConfig, ExportConfig
from dflash_offline.config.run import DEMO_MODEL, EMBEDDED, RunConfig
from dflash_offline.config.section import Gpus, Section
from dflash_offline.config.store import StoreConfig
from dflash_offline.config.target import TargetConfig
from dflash_offline.config.train import TrainConfig

__all__ = [
    "DEMO_MODEL",
    "EMBEDDED",
    "CorpusConfig",
    "DrafterConfig",
    "EvaluateConfig",
    "ExportConfig",
    "Gpus",
    "HostConfig",
    "RegenerateConfig",
    "RunConfig",
    "Section",
    "StoreConfig",
    "TargetConfig",
    "TrainConfig",
    "same_host",
]
