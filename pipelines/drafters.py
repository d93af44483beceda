"""Tasks about one of several drafters ([[drafters]]), and where they stand among one another.

A drafter's task first holds the devices it needs, then takes the drafter itself. It waits for neither while it holds the
other, so drafters queue for GPUs in any number, and hosts that share a root each take what nobody else is at.
"""

import contextlib
import time

import luigi

from dflash_offline.gpus import try_locked
from dflash_offline.processes import Job
from dflash_offline.progress import Progress
from pipelines.base import RunTask, one_line_process_errors
from pipelines.places import Held, Share, node_of_this_host

LOOK_AGAIN_S = 2.0


class DrafterTask(RunTask):
    """A stage of one drafter. ``drafter`` is empty for a run file without [[drafters]]: then it is the task it would be without."""

    drafter = luigi.Parameter(default="", description="name of the drafter, where the run file has several")

    def share(self) -> Share:
        """The devices it may run on, where there are several drafters."""
        raise NotImplementedError

    def jobs_on(self, held: Held, *, peers: int) -> list[Job]:
        """The processes of this stage on these devices; ``peers`` of all drafters run on this host at a time."""
        raise NotImplementedError

    @property
    def priority(self) -> int:  # type: ignore[override]
        """Drafters start in the order of the run file."""
        names = self.whole_config.drafter_names
        return len(names) - names.index(self.drafter) if self.drafter in names else 0

    def run(self) -> None:
        """As ``RunTask.run``; one of several drafters waits for its devices, and for another host that is at it.

        Raises:
            ProcessError: a process failed, or ended well and left no output.
        """
        if not self.drafter and not self.waits_for_nodes:
            super().run()
            return
        attempt = self._look if self.waits_for_nodes else self._attempt
        with one_line_process_errors(self.logs):
            self.logs.mkdir(parents=True, exist_ok=True)
            with Waiting(self) as waiting:
                while not self.complete() and not attempt(waiting):
                    time.sleep(LOOK_AGAIN_S)

    @property
    def waits_for_nodes(self) -> bool:
        """Whether the run file names the hosts that train and evaluate, and this is none of them."""
        return bool(self.run_config.train.nodes) and node_of_this_host(self.run_config) is None

    def _look(self, waiting: "Waiting") -> bool:
        nodes = ", ".join(self.run_config.train.nodes)
        waiting.say(f"waits for what {nodes} make; this host is not in [train] nodes")
        waiting.tick()
        return False

    def _attempt(self, waiting: "Waiting") -> bool:
        """Run if nobody else is at this drafter; whether that was so."""
        share = self.share()
        with share.hold(waiting.say, tick=waiting.tick) as held, try_locked(self.logs / f"{self.job_name()}.lock") as lock:
            if lock is None:
                waiting.say("another run of it is under way, maybe on another host")
                waiting.tick()
                return False
            waiting.over()
            if not self.complete():
                self.run_processes(self.jobs_on(held, peers=share.peers), inherit=[*held.descriptors, lock], leased=True)
            return True


class Waiting:
    """Tells what a task waits for: once on the terminal, and in a progress file for ``dflash-offline status``."""

    def __init__(self, task: RunTask) -> None:
        self._name, self._say = task.job_name(), task.say
        folder = task.logs_of_this_host
        folder.mkdir(parents=True, exist_ok=True)
        self._progress = Progress(folder / f"{self._name}.progress.json")
        self._progress.state["key"] = task.key
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(f"{self._name}: {text}")
        self._progress.state["text"] = text

    def tick(self) -> None:
        self._progress.update()

    def over(self) -> None:
        """Once: from then on a file of that name is the process's own."""
        path, self._progress.path = self._progress.path, None
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def __enter__(self) -> "Waiting":
        return self

    def __exit__(self, *exception: object) -> None:
        self.over()
