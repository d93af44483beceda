"""Optional trackers beside TensorBoard: wandb and trackio get the same scalars under the same names.

Each is imported only where ``[train] trackers`` names it. Without an account on this machine wandb writes to the run's
folder, from where ``wandb sync`` sends it later; WANDB_MODE is followed where it is set. Trackio writes to its usual
folder (TRACKIO_DIR), where ``trackio show`` finds it. Nothing of the environment is sent or written: no host facts, no
console output, no code. What a tracker does wrong during training is said once and never stops it.
"""

import contextlib
import importlib.util
import io
import netrc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_offline.errors import TrainError

Log = Callable[[Mapping[str, float], int], None]


def check_installed(names: Sequence[str]) -> None:
    """
    Raises:
        TrainError: one of them is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise TrainError(f'[train] trackers names "{name}", which is not installed; run `pip install {name}`, or leave it out')


class Trackers:
    """The trackers of one run; only rank 0 has them.

    Args:
        names: of ``[train] trackers``.
        project, run: what they call it.
        folder: of the drafter.
        settings: JSON values shown beside the run.
        say: prints a line.

    Raises:
        TrainError: one of them cannot be started.
    """

    def __init__(
        self, names: Sequence[str], *, project: str, run: str, folder: Path, settings: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._open: dict[str, tuple[Log, Callable[[], None]]] = {}
        starters = {"wandb": _start_wandb, "trackio": _start_trackio}
        for name in names:
            try:
                log, finish, line = starters[name](project, run, folder, settings)
            except Exception as error:  # whatever it raises: the user asked for it, so its absence is an error
                self.close()
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise TrainError(
                    f'[train] trackers: "{name}" cannot be started ({reason}); leave it out, or see its own settings'
                ) from None
            self._open[name] = (log, finish)
            say(line)

    def log(self, scalars: Sequence[tuple[str, float]], *, step: int) -> None:
        """Pass on the numbers of one row."""
        for name, (log, _) in list(self._open.items()):
            self._try(name, lambda log=log: log(dict(scalars), step))

    def close(self) -> None:
        """Finish what is being sent."""
        for name, (_, finish) in list(self._open.items()):
            self._try(name, finish)
        self._open = {}

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                call()
        except Exception as error:
            self._open.pop(name, None)
            self._say(f"warning: {name} failed and gets no more numbers ({' '.join(str(error).split())[:200]}); training goes on")


def _start_wandb(project: str, run: str, folder: Path, settings: dict[str, Any]) -> tuple[Log, Callable[[], None], str]:
    import wandb

    mode = os.environ.get("WANDB_MODE") or ("online" if _has_account() else "offline")
    quiet = {"silent": True, "console": "off", "save_code": False, "disable_code": True, "disable_git": True}
    quiet |= {"x_disable_meta": True, "x_disable_stats": True}
    started = wandb.init(
        project=project,
        id=run,
        name=run,
        dir=os.environ.get("WANDB_DIR") or str(folder),
        mode=mode,
        resume="allow",
        config=settings,
        settings=wandb.Settings(**quiet),
    )
    where = f"wandb: {started.url}" if mode == "online" else f"wandb: {mode}, {started.dir}"
    later = "; send it later with `wandb sync`" if mode == "offline" else ""
    return (lambda scalars, step: started.log(dict(scalars), step=step)), started.finish, where + later


def _has_account() -> bool:
    """Whether wandb would find a key: in the environment, or as ``wandb login`` leaves it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        host = (os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").split("//")[-1].split("/")[0]
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


def _start_trackio(project: str, run: str, folder: Path, settings: dict[str, Any]) -> tuple[Log, Callable[[], None], str]:
    with contextlib.redirect_stdout(io.StringIO()):
        import trackio

        started = trackio.init(
            project=project, name=run, config=settings, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )
    line = f'trackio: run {run}; look at it with `trackio show --project "{project}"`'
    return (lambda scalars, step: started.log(dict(scalars), step=step)), started.finish, line
