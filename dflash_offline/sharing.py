"""What a run shares with others, said before it starts: its root, and the place of its store in an object store."""

import re
from collections.abc import Iterator

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.errors import DFlashError, StoreError
from dflash_offline.figures import counted, first_of
from dflash_offline.layout import Layout

_KEY = re.compile(r"[0-9a-f]{16}")
_SHOWN = 3


def shared(config: RunConfig) -> list[str]:
    """One line for each thing shared: what it is, and whether that is fine.

    Raises:
        DFlashError: the target cannot be read.
    """
    return [*_of_root(config), *_of_url(config)]


def refusal(config: RunConfig) -> str | None:
    """Why capture will refuse to write into this run's place below ``[store] url``: another root does. None where it may.

    Raises:
        DFlashError: the target cannot be read.
    """
    from dflash_offline.store import remote
    from dflash_offline.store.objects import open_objects

    key = keys.capture_key(config)
    if (location := config.store.location(key)) is None:
        return None
    try:
        here = remote.read_remote(Layout(config.root_dir).store(key))
        return remote.refusal(open_objects(location), None if here is None else here["writer"])
    except StoreError:  # no root writes there yet; or the store cannot be asked, and ``shared`` says so
        return None


def _of_root(config: RunConfig) -> Iterator[str]:
    """Stores of run files that lead to another identity. Each has a folder of its own."""
    from dflash_offline.store import schema

    layout, key, mine = Layout(config.root_dir), keys.capture_key(config), keys.store_identity(config)
    found, unread = [], []
    for path in sorted(layout.root.glob(f"captures/*/hidden_states.zarr/{schema.GROUP_FILE}")):
        if path.parent.parent.name != key:
            try:
                other = schema.read_attributes(path.parent)["identity"]
            except DFlashError as error:
                unread.append(str(error))
                continue
            found.append(f"{path.parent.parent.name} ({', '.join(_differing(mine, other)) or 'nothing'})")
    if found:
        yield (
            f"{layout.root} also holds {counted(len(found), 'store')} with another key, in brackets what differs: "
            f"{first_of(found, _SHOWN)}; that is fine, each has a folder of its own"
            + ("" if (layout.store(key) / schema.GROUP_FILE).is_file() else ", but this run file captures anew")
        )
    if unread:
        which = first_of(unread, _SHOWN, "; ")
        yield f"{counted(len(unread), 'other store')} below {layout.root} cannot be read and is left out here: {which}"


def _differing(mine: dict[str, object], other: dict[str, object]) -> list[str]:
    """Names of the fields that only one of them has, or that have another value there."""
    return [name for name in {**mine, **other} if name not in mine or name not in other or mine[name] != other[name]]


def _of_url(config: RunConfig) -> Iterator[str]:
    """Stores of other roots below ``[store] url``."""
    from dflash_offline.store.objects import open_objects

    layout, key = Layout(config.root_dir), keys.capture_key(config)
    if config.store.url is None:
        return
    try:
        others = [name for name in open_objects(config.store.url).folders() if _KEY.fullmatch(name) and name != key]
    except StoreError as error:
        yield f"what else is below [store] url cannot be told: {error}"
        return
    if others := [name for name in others if not layout.capture(name).exists()]:
        yield (
            f"{config.store.url} also holds {counted(len(others), 'store')} of other roots, with other keys: "
            "that is fine, each has a folder of its own"
        )
