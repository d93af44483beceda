"""What luigid's page shows of a task: how far its processes are, in words and per cent, and a link."""

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import luigi

if TYPE_CHECKING:
    from pipelines.base import RunTask

_WIDTH = 70  # of a message line, in characters: what the window on its page shows


class Forwarder:
    """Sends progress on to Luigi's scheduler from a thread of its own: a call to a dead luigid can block for a minute.

    The link is the live page (``dflash-offline report --serve``) where it is served on this host, and else the log.
    """

    def __init__(self, task: "RunTask") -> None:
        self._task = task
        self._thread: threading.Thread | None = None
        self._latest: dict[str, dict[str, Any]] = {}  # not sent yet
        self._sent: dict[str, Any] = {}

    def __call__(self, states: dict[str, dict[str, Any]]) -> None:
        if luigi.configuration.get_config().getboolean("core", "local_scheduler", False) or "--local-scheduler" in sys.argv:
            return  # it lives in another process and shows nothing
        self._latest = states
        if states and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._send, daemon=True)
            self._thread.start()

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Give the last state the time to arrive; a dead luigid is not waited for."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _send(self) -> None:
        with contextlib.suppress(Exception):  # progress is advisory
            while states := self._latest:
                self._latest = {}
                self._tell("status_message", message(self._task.stage, states))
                if (share := percentage(states)) is not None:
                    self._tell("progress_percentage", share)
                self._tell("tracking_url", self._link(next(iter(states))))

    def _tell(self, what: str, value: Any) -> None:
        """Send a value once."""
        if self._sent.get(what) != value:
            getattr(self._task, f"set_{what}")(value)
            self._sent[what] = value

    def _link(self, name: str) -> str:
        from dflash_offline.report.serving import serving_url

        return serving_url(self._task.layout) or (self._task.logs / f"{name}.log").absolute().as_uri()


def message(stage: str, states: dict[str, dict[str, Any]]) -> str:
    """The lines that a terminal shows, without colours. luigid's page puts them in as HTML, so what would be a tag is not."""
    from dflash_offline.watch.lines import stage_lines

    lines = [line.plain for line in stage_lines(stage, states, width=_WIDTH)]
    return "\n".join(lines).replace("&", "+").replace("<", "\u2039").replace(">", "\u203a")


def percentage(states: dict[str, dict[str, Any]]) -> int | None:
    """Mean share that is done, 0 to 100; None while no process knows its total."""
    shares = [min(1.0, state["done"] / state["total"]) for state in states.values() if state["total"] and state["done"] is not None]
    return int(100 * sum(shares) / len(shares)) if shares else None
