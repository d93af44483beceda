"""Write trained drafters in the forms servers load, check what was written, read folders back, convert.

==================  ==================================================================================
``formats.py``      names and shapes of tensors; ``config.json`` of the z-lab and speculators forms
``writing.py``      a folder: bf16 tensors, then the config
``conformance.py``  what must hold of a written folder, checked from its files alone
``reading.py``      ``read_drafter``: a folder, ours or another's -> shape and tensors, or a refusal
``warm_start.py``   the drafter of ``[drafter] init_from``: the same shape, or a refusal
``convert.py``      z-lab <-> speculators, tensors byte for byte
``card.py``         the model card and the serve commands
``stage.py``        ``python -m dflash_offline.export``; ``export_weights`` for one folder
==================  ==================================================================================
"""

from dflash_offline.export.card import model_card, serve_commands
from dflash_offline.export.conformance import Check, check_folder, require
from dflash_offline.export.convert import convert
from dflash_offline.export.formats import FORMATS, Format, TargetInfo, speculators_config, tensor_shapes, zlab_config
from dflash_offline.export.reading import ExportedDrafter, check_fits, check_tensors, read_drafter, read_tensors
from dflash_offline.export.stage import export, export_weights, load_checkpoint, load_trained
from dflash_offline.export.writing import write_folder

__all__ = [
    "FORMATS",
    "Check",
    "ExportedDrafter",
    "Format",
    "TargetInfo",
    "check_fits",
    "check_folder",
    "check_tensors",
    "convert",
    "export",
    "export_weights",
    "load_checkpoint",
    "load_trained",
    "model_card",
    "read_drafter",
    "read_tensors",
    "require",
    "serve_commands",
    "speculators_config",
    "tensor_shapes",
    "write_folder",
    "zlab_config",
]
