"""Turn a z-lab folder into a speculators folder and back. Tensors are copied byte for byte, the model card goes along."""

from pathlib import Path

from dflash_offline.drafter import DrafterShape
from dflash_offline.errors import ExportError
from dflash_offline.export.card import converted_card
from dflash_offline.export.conformance import Check, check_folder, require
from dflash_offline.export.formats import Format, TargetInfo
from dflash_offline.export.reading import read_drafter
from dflash_offline.export.writing import write_folder
from dflash_offline.manifest import write_bytes


def convert(
    source: Path | str, destination: Path | str, *, form: Format, target: TargetInfo | None = None, num_target_layers: int | None = None
) -> list[Check]:
    """Write the drafter in ``source`` to ``destination`` in the other format, or what training wrote in either.

    A model card of ours is written too, with the other format's serve commands. Of a folder without one none is made up:
    it does not say what its drafter was trained on.

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
    card = _card(read.folder / "README.md")
    write_folder(destination, form=form, shape=shape, target=target, tensors=read.tensors)
    if card is not None and (converted := converted_card(card, form=form, shape=shape)) is not None:
        write_bytes(destination / "README.md", converted.encode())
    checks = check_folder(destination, form=form, shape=shape, target=target, source=read.tensors)
    require(checks, destination)
    return checks


def _card(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # a card is no reason to keep the drafter back
        return None
