"""The whole pipeline, top to bottom.

::

    RegenerateResponses    with [regenerate] in the run file: the target writes the answers; replicas together
    PrepareCorpus          conversations -> token ids, loss masks, buckets; and the plan of what to capture
      CaptureReplica x N   one target-model process each; together they fill the store, part by part
        CaptureHiddenStates
          TrainDrafter     one process per rank, started together; with [[drafters]] one task for each
            ExportDrafter      the drafter as servers load it
            EvaluateDrafter    draft and verify with the real target
              WriteReport      ranks the drafters
                DFlashAll

A stage's output is the manifest it writes last, never a folder. Keys are in the paths, so a changed setting makes
another output and an unchanged one is never made again. Models run as ``python -m dflash_offline.STAGE``.
"""

import functools
import time
from pathlib import Path
from typing import Any

import luigi

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.gpus import check_settings
from dflash_offline.manifest import MANIFEST, read_json
from dflash_offline.processes import CHECKPOINT_GRACE_S, Job, free_port, rank_environment
from dflash_offline.prompts import data_sets
from dflash_offline.report.ranking import Ranked, is_tied, ranked
from pipelines.base import RunTask, StoppedError, load, one_line, outcome
from pipelines.drafters import DrafterTask
from pipelines.places import (
    Held,
    Share,
    capture_gpus,
    evaluate_gpu,
    evaluation_share,
    node_of_this_host,
    regenerate_gpus,
    train_gpus,
    training_share,
)

SEEN_ELSEWHERE_S = 120.0  # files of another host: network file systems show them late


def plan_key(config: RunConfig) -> str:
    """The rows of one corpus in one store."""
    return f"{keys.capture_key(config)}-{keys.corpus_key(config)}"


class RegenerateResponses(RunTask):
    """The target, or servers that run it, answer prompts. Processes share the parts; what is answered is never asked again."""

    stage = "regenerate"
    task_key = staticmethod(keys.regenerate_key)
    on_every_host = True

    def output(self) -> luigi.LocalTarget:
        return target(self.layout.regeneration(self.key) / MANIFEST)

    def jobs(self) -> list[Job]:
        gpus = regenerate_gpus(self.run_config)
        return [
            stage_job(
                self,
                "regenerate",
                key=self.key,
                name=f"regenerate-{replica}",
                options=["--replica", str(replica), "--replicas", str(len(gpus))],
                gpu=gpu,
                peers=len(gpus),
            )
            for replica, gpu in enumerate(gpus)
        ]


class PrepareCorpus(RunTask):
    """Tokenise the conversations, and plan which of them the store still lacks."""

    stage = "corpus"
    task_key = staticmethod(plan_key)

    def requires(self) -> list[luigi.Task]:
        return [RegenerateResponses(config=self.config)] if self.run_config.regenerates else []

    def output(self) -> list[luigi.LocalTarget]:
        corpus, capture = self.stage_key(keys.corpus_key), self.stage_key(keys.capture_key)
        return [target(self.layout.corpus(corpus) / MANIFEST), target(self.layout.plan(capture, corpus))]

    def jobs(self) -> list[Job]:
        return [stage_job(self, "corpus", key=self.stage_key(keys.corpus_key))]


class CaptureReplica(RunTask):
    """One target-model process. Replicas share the plan's parts among themselves; each ends when all are committed."""

    stage = "capture"
    task_key = staticmethod(plan_key)
    on_every_host = True
    replica = luigi.IntParameter(description="number of this replica, from 0")
    replicas = luigi.IntParameter(description="replicas in all")

    def requires(self) -> luigi.Task:
        return PrepareCorpus(config=self.config)

    def output(self) -> list[luigi.LocalTarget]:
        capture, corpus = self.stage_key(keys.capture_key), self.stage_key(keys.corpus_key)
        plan = self.layout.plan(capture, corpus)
        if not plan.exists():
            return [target(plan)]  # what there is to capture is not known yet
        content = read_json(plan)
        parts = [*content["reused"], *(part["name"] for part in content["parts"])]
        return [target(self.layout.store(capture) / part / MANIFEST) for part in parts]

    def job_name(self) -> str:
        return f"capture-{self.replica}"

    def jobs(self) -> list[Job]:
        gpu = capture_gpus(self.run_config)[self.replica]
        options = ["--replica", str(self.replica), "--replicas", str(self.replicas)]
        key = self.stage_key(keys.capture_key)
        return [stage_job(self, "capture", key=key, name=self.job_name(), options=options, gpu=gpu, peers=self.replicas)]

    def stop_requested(self) -> str | None:
        if reason := outcome().failure(self.task_family):
            raise StoppedError(f"{self.job_name()} was stopped because {reason}")
        return None


class CaptureHiddenStates(luigi.WrapperTask, RunTask):
    """Every row of the corpus is in the store."""

    task_key = staticmethod(plan_key)

    def requires(self) -> list[luigi.Task]:
        with one_line():
            replicas = len(capture_gpus(self.run_config))
        return [CaptureReplica(config=self.config, replica=i, replicas=replicas) for i in range(replicas)]

    def run(self) -> None:
        """Nothing of its own."""


class TrainDrafter(DrafterTask):
    """Train from the store: one process per rank, together. A rank that dies takes the others with it.

    With [train] nodes every one of them starts its own ranks; the first node's write the drafter.
    """

    stage = "train"
    task_key = staticmethod(keys.train_key)
    grace_s = CHECKPOINT_GRACE_S

    @property
    def on_every_host(self) -> bool:  # type: ignore[override]
        return bool(self.run_config.train.nodes)

    def requires(self) -> luigi.Task:
        config = self.run_config
        with one_line():  # a GPU that is not there, or cannot train like this, is said now, not after days of capture
            if self.drafter:
                check_settings(config.train, self.share().gpus.values(), where=config.where("train"))
            elif not self.waits_for_nodes:
                check_settings(config.train, train_gpus(config))
        return CaptureHiddenStates(config=self.config)

    def output(self) -> luigi.LocalTarget:
        return target(self.layout.drafter(self.key) / MANIFEST)

    def share(self) -> Share:
        return training_share(self.whole_config, self.drafter, locks=self.logs)

    def jobs_on(self, held: Held, *, peers: int) -> list[Job]:
        return self._ranks(held.gpus, peers=peers)

    def jobs(self) -> list[Job]:
        devices = train_gpus(self.run_config)
        return self._ranks(devices, peers=len(devices))

    def _ranks(self, devices: list[str | None], *, peers: int) -> list[Job]:
        first, meeting = 0, dict[str, Any](port=free_port())
        if (node := node_of_this_host(self.run_config)) is not None:
            first, meeting = node.first_rank, {"size": node.world_size, "address": node.address, "port": node.port}
            self.say(
                f"train: node {node.number + 1} of {len(self.run_config.train.nodes)}, "
                f"{len(devices)} of {node.world_size} ranks, which meet at {node.address}:{node.port}"
            )
        return [
            stage_job(
                self,
                "train",
                key=self.key,
                name=f"{self.job_name()}-{first + local}",
                gpu=gpu,
                peers=peers,
                environment=rank_environment(local, len(devices), first=first, **meeting),
            )
            for local, gpu in enumerate(devices)
        ]

    def outputs_written(self) -> None:
        """The first node writes the drafter, which the others may see a little later than their ranks end."""
        node = node_of_this_host(self.run_config)
        end = time.monotonic() + SEEN_ELSEWHERE_S
        while node is not None and node.number and not self.complete() and time.monotonic() < end:
            time.sleep(0.5)


class ExportDrafter(DrafterTask):
    """Write the drafter in the forms that servers load, and check them."""

    stage = "export"
    task_key = staticmethod(keys.export_key)

    def requires(self) -> luigi.Task:
        return TrainDrafter(config=self.config, drafter=self.drafter)

    def output(self) -> luigi.LocalTarget:
        return target(self.layout.export(self.key) / MANIFEST)

    def run(self) -> None:
        RunTask.run(self)  # needs no GPU, so it waits for none

    def jobs(self) -> list[Job]:
        return [stage_job(self, "export", key=self.key, name=self.job_name())]


class EvaluateDrafter(DrafterTask):
    """Draft and verify with the real target: acceptance length, speed, and that the text is the target's own."""

    stage = "evaluate"
    task_key = staticmethod(keys.evaluate_key)

    def requires(self) -> luigi.Task:
        with one_line():
            if self.drafter:
                self.share()
            elif not self.waits_for_nodes:
                evaluate_gpu(self.run_config)
            check_prompts(self.config)
        return TrainDrafter(config=self.config, drafter=self.drafter)

    def output(self) -> luigi.LocalTarget:
        return target(self.layout.evaluation(self.key) / MANIFEST)

    def share(self) -> Share:
        return evaluation_share(self.whole_config, self.drafter, locks=self.layout.logs("train"))

    def jobs_on(self, held: Held, *, peers: int) -> list[Job]:
        return [stage_job(self, "evaluate", key=self.key, name=self.job_name(), gpu=held.gpus[0], peers=peers)]

    def jobs(self) -> list[Job]:
        return [stage_job(self, "evaluate", key=self.key, gpu=evaluate_gpu(self.run_config))]


class WriteReport(RunTask):
    """One page about the run."""

    stage = "report"
    task_key = staticmethod(keys.report_key)

    def requires(self) -> list[luigi.Task]:
        names = self.run_config.drafter_names or [""]
        return [kind(config=self.config, drafter=name) for kind in (ExportDrafter, EvaluateDrafter) for name in names]

    def output(self) -> luigi.LocalTarget:
        return target(self.layout.report(self.key) / MANIFEST)

    def jobs(self) -> list[Job]:
        return [stage_job(self, "report", key=self.key)]


class DFlashAll(luigi.WrapperTask, RunTask):
    """Everything; the last lines of the command say where the results are."""

    task_key = staticmethod(keys.report_key)

    def requires(self) -> luigi.Task:
        return WriteReport(config=self.config)

    def deps(self) -> Any:
        """As ``RunTask.deps``; of several drafters, those that are evaluated are named even if another one fails."""
        if self.run_config.drafters:
            outcome().when_failed = lambda: "\n".join(ranking_lines(ranked(self.run_config)))
        return super().deps()

    def run(self) -> None:
        outcome().add("result", self.task_family, self.results())

    def results(self) -> str:
        """Where the drafter and the report are, and the acceptance length; of several drafters the best one's, then all by rank."""
        found = ranked(self.run_config)
        best = found[0]
        length = best.length
        lines = [
            f"drafter: {shown(best.export / best.config.export.formats[0])}",
            f"report: {shown(self.layout.report(self.key) / 'report.html')}",
            "acceptance length: not measured, [evaluate] prompts names no file" if length is None else f"acceptance length: {length:.2f}",
        ]
        if best.name:
            tied = " (intervals overlap)" if is_tied(found) else ""
            lines += [f"best of {len(found)} drafters: {best.name}{tied}", *ranking_lines(found)]
        if best.config.evaluation_gpus == "cpu":
            lines.append("(on a CPU, drafting shows no speed-up: it is the acceptance length that carries over to a GPU)")
        return "\n".join(lines)


@DFlashAll.event_handler(luigi.Event.DEPENDENCY_PRESENT)
def _already_complete(task: DFlashAll) -> None:
    outcome().add("result", task.task_family, f"nothing to do, everything is there\n{task.results()}")


def ranking_lines(found: list[Ranked]) -> list[str]:
    """A line for each evaluated drafter, best first."""
    return [f"{rank}. {one.name}: {one.figures()}, {shown(one.export / one.config.export.formats[0])}" for rank, one in enumerate(found, 1)]


@functools.lru_cache
def check_prompts(path: Path) -> None:
    """Read the evaluation's prompts, once a process: a line that is none is said now, not after capture and training.

    Raises:
        EvaluateError: as ``data_sets``.
    """
    data_sets(load(path))


def target(path: Path) -> luigi.LocalTarget:
    return luigi.LocalTarget(str(path))


def shown(path: Path) -> str:
    """A path as a user would type it: relative where it is below the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def stage_job(
    task: RunTask,
    stage: str,
    *,
    key: str,
    name: str | None = None,
    options: list[str] | None = None,
    gpu: str | None = None,
    peers: int = 1,
    environment: dict[str, str] | None = None,
) -> Job:
    """``python -m dflash_offline.STAGE --config FILE [--drafter NAME] --key KEY OPTIONS``."""
    drafter = ["--drafter", task.drafter] if task.drafter else []
    arguments = ["--config", str(task.config), *drafter, "--key", key, *(options or [])]
    return Job(name or stage, f"dflash_offline.{stage}", arguments, gpu=gpu, peers=peers, environment=environment or {})
