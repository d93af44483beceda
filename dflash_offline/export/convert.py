"""Turn a z-lab folder into a speculators folder and back. Tensors are copied byte for byte."""

from pathlib import Path

from dflash_offline.drafter import DrafterShape
from dflash_offline.errors import ExportError
from dflash_offline.export.conformance import Check, check_folder, require
from dflash_offline.export.formats import Format, TargetInfo
from dflash_offline.export.reading import read_drafter
from dflash_offline.export.writing import write_folder


def convert(
    source: Path | str, destination: Path | str, *, form: Format, target: TargetInfo | None = None, num_target_layers: int | None = None
) -> list[Check]:
    """Write the drafter in ``source`` to ``destination`` in the other format, or what training wrote in either.

    Args:
        form: the format to write.
        target: name, architectures and special tokens of the target; what the source says where left out. A z-lab
            folder does not name its target, a speculators folder has to.
        num_target_layers: layers of the target; needed when ``source`` is a speculators folder whose verifier is not
            on this machine.

    Returns:
        The conformance checks of the new folder, all passed.

    Raises:
        ExportError: the source cannot be read, is already of that form, or the target's name is missing.
    """
    source, destination = Path(source), Path(destination)
    read = read_drafter(source, num_target_layers=num_target_layers)
    if read.form == form:
        raise ExportError(f"{source}: is a {form} folder already")
    if target is None:
        target = read.target
    if form == "speculators" and not target.name:
        raise ExportError(f"{source}: it does not name its target, which the speculators format needs; name it")
    shape: DrafterShape = read.shape
    write_folder(destination, form=form, shape=shape, target=target, tensors=read.tensors)
    checks = check_folder(destination, form=form, shape=shape, target=target, source=read.tensors)
    require(checks, destination)
    return checks
