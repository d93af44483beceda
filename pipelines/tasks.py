"""The whole pipeline, top to bottom.

::

    RegenerateResponses    with [regenerate] in the run file: the target writes the answers; replicas together
    PrepareCorpus          conversations -> token ids, loss masks, buckets; and the plan of what to capture
      CaptureReplica x N   one target-model process each; together they fill the store, part by part
        CaptureHiddenStates
          TrainDrafter     one process per rank, started together
            ExportDrafter      the drafter as servers load it
            EvaluateDrafter    draft and verify with the real target
              WriteReport
                DFlashAll

A stage's output is the manifest it writes last, never a folder. Keys are in the paths, so a changed setting makes
another output and an unchanged one is never made again. Models run as ``python -m dflash_offline.STAGE``.
"""

import socket
from pathlib import Path

import luigi

from dflash_offline import keys
from dflash_offline.config import Gpus, RunConfig
from dflash_offline.gpus import resolve
from dflash_offline.manifest import MANIFEST, read_json
from dflash_offline.processes import Job
from pipelines.base import RunTask, StoppedError, one_line, outcome

CHECKPOINT_GRACE_S = 120.0


def plan_key(config: RunConfig) -> str:
    """The rows of one corpus in one store."""
    return f"{keys.capture_key(config)}-{keys.corpus_key(config)}"


class RegenerateResponses(RunTask):
    """The target, or servers that run it, answer prompts. Processes share the parts; what is answered is never asked again."""

    stage = "regenerate"
    task_key = staticmethod(keys.regenerate_key)

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


class TrainDrafter(RunTask):
    """Train from the store: one process per rank, together. A rank that dies takes the others with it."""

    stage = "train"
    task_key = staticmethod(keys.train_key)
    grace_s = CHECKPOINT_GRACE_S

    def requires(self) -> luigi.Task:
        with one_line():  # a GPU that is not there is said now, not after days of capture
            train_gpus(self.run_config)
        return CaptureHiddenStates(config=self.config)

    def output(self) -> luigi.LocalTarget:
        return target(self.layout.drafter(self.key) / MANIFEST)

    def jobs(self) -> list[Job]:
        config = self.run_config
        devices = train_gpus(config)
        world = {
            "WORLD_SIZE": str(len(devices)),
            "LOCAL_WORLD_SIZE": str(len(devices)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        return [
            stage_job(
                self,
                "train",
                key=self.key,
                name=f"train-{rank}",
                gpu=gpu,
                peers=len(devices),
                environment={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, gpu in enumerate(devices)
        ]


class ExportDrafter(RunTask):
    """Write the drafter in the forms that servers load, and check them."""

    stage = "export"
    task_key = staticmethod(keys.export_key)

    def requires(self) -> luigi.Task:
        return TrainDrafter(config=self.config)

    def output(self) -> luigi.LocalTarget:
        return target(self.layout.export(self.key) / MANIFEST)

    def jobs(self) -> list[Job]:
        return [stage_job(self, "export", key=self.key)]


class EvaluateDrafter(RunTask):
    """Draft and verify with the real target: acceptance length, speed, and that the text is the target's own."""

    stage = "evaluate"
    task_key = staticmethod(keys.evaluate_key)

    def requires(self) -> luigi.Task:
        with one_line():
            evaluate_gpu(self.run_config)
        return TrainDrafter(config=self.config)

    def output(self) -> luigi.LocalTarget:
        return target(self.layout.evaluation(self.key) / MANIFEST)

    def jobs(self) -> list[Job]:
        return [stage_job(self, "evaluate", key=self.key, gpu=evaluate_gpu(self.run_config))]


class WriteReport(RunTask):
    """One page about the run."""

    stage = "report"
    task_key = staticmethod(keys.report_key)

    def requires(self) -> list[luigi.Task]:
        return [ExportDrafter(config=self.config), EvaluateDrafter(config=self.config)]

    def output(self) -> luigi.LocalTarget:
        return target(self.layout.report(self.key) / MANIFEST)

    def jobs(self) -> list[Job]:
        return [stage_job(self, "report", key=self.key)]


class DFlashAll(luigi.WrapperTask, RunTask):
    """Everything; the last lines of the command say where the results are."""

    task_key = staticmethod(keys.report_key)

    def requires(self) -> luigi.Task:
        return WriteReport(config=self.config)

    def run(self) -> None:
        outcome().add("result", self.task_family, self.results())

    def results(self) -> str:
        """Where the drafter and the report are, and the acceptance length."""
        layout, config = self.layout, self.run_config
        found = read_json(layout.evaluation(self.stage_key(keys.evaluate_key)) / "results.json")
        export = layout.export(self.stage_key(keys.export_key))
        length = found["overall"]["acceptance_length"]
        lines = [
            f"drafter: {shown(export / config.export.formats[0])}",
            f"report: {shown(layout.report(self.key) / 'report.html')}",
            "acceptance length: not measured, [evaluate] prompts names no file" if length is None else f"acceptance length: {length:.2f}",
        ]
        if evaluate_gpus(config) == "cpu":
            lines.append("(on a CPU, drafting shows no speed-up: it is the acceptance length that carries over to a GPU)")
        return "\n".join(lines)


@DFlashAll.event_handler(luigi.Event.DEPENDENCY_PRESENT)
def _already_complete(task: DFlashAll) -> None:
    outcome().add("result", task.task_family, f"nothing to do, everything is there\n{task.results()}")


def target(path: Path) -> luigi.LocalTarget:
    return luigi.LocalTarget(str(path))


def shown(path: Path) -> str:
    """A path as a user would type it: relative where it is below the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def capture_gpus(config: RunConfig) -> list[str | None]:
    """The GPU of each replica."""
    return resolve(config.target.gpus, config.target.replicas, where="[target] gpus")


def train_gpus(config: RunConfig) -> list[str | None]:
    """The GPU of each rank."""
    return resolve(config.train.gpus, config.train.ranks, where="[train] gpus")


def regenerate_gpus(config: RunConfig) -> list[str | None]:
    """The GPU of each process that answers; servers are asked by one process."""
    section = config.regenerate
    if section.backend == "server":
        return [None]
    gpus, where = (config.target.gpus, "[target] gpus") if section.gpus is None else (section.gpus, "[regenerate] gpus")
    return resolve(gpus, section.replicas, where=where)


def evaluate_gpus(config: RunConfig) -> Gpus:
    """GPUs of the evaluation, of which the first is used; those of training when left out."""
    return config.train.gpus if config.evaluate.gpus is None else config.evaluate.gpus


def evaluate_gpu(config: RunConfig) -> str | None:
    """The GPU of the evaluation."""
    where = "[train] gpus" if config.evaluate.gpus is None else "[evaluate] gpus"
    return resolve(evaluate_gpus(config), where=where)[0]


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
    """``python -m dflash_offline.STAGE --config FILE --key KEY OPTIONS``."""
    arguments = ["--config", str(task.config), "--key", key, *(options or [])]
    return Job(name or stage, f"dflash_offline.{stage}", arguments, gpu=gpu, peers=peers, environment=environment or {})


def free_port() -> int:
    """A TCP port of this host that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
