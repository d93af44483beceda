"""The Luigi pipeline: ``luigi --module pipelines DFlashAll [--config FILE]``.

Reading order: ``tasks.py`` is the whole pipeline from top to bottom; ``base.py`` what its tasks share; ``drafters.py``
what those about one of several drafters do besides; ``places.py`` which GPUs and hosts they run on; ``terminal.py`` progress
below what is printed; ``forwarding.py`` progress on luigid's page; ``outcome.py`` the last lines of a command; ``settings.py``
what it needs of Luigi. No module here imports torch, zarr or
transformers: models run in processes of their own, and the command itself starts in a fraction of a second.
"""

from pipelines import base, settings
from pipelines.tasks import (
    CaptureHiddenStates,
    CaptureReplica,
    DFlashAll,
    EvaluateDrafter,
    ExportDrafter,
    PrepareCorpus,
    RegenerateResponses,
    TrainDrafter,
    WriteReport,
)

__all__ = [
    "CaptureHiddenStates",
    "CaptureReplica",
    "DFlashAll",
    "EvaluateDrafter",
    "ExportDrafter",
    "PrepareCorpus",
    "RegenerateResponses",
    "TrainDrafter",
    "WriteReport",
]

# The one place where something happens at import: Luigi imports this package before it reads its own settings, and
# forks its task processes later, which then share the outcome.
settings.apply()
base.outcome()
