"""Several drafters from one store, and one drafter over several hosts: the literal command, in real processes.

Hosts are processes of this machine that are told another host name.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import training_runs as runs
from click.testing import CliRunner
from conftest import write_run_file

from dflash_offline import gpus, keys
from dflash_offline.cli import main
from dflash_offline.config import RunConfig
from dflash_offline.layout import Layout
from dflash_offline.manifest import read_json, read_manifest
from dflash_offline.report.ranking import Ranked, interval_of_mean, is_tied, ranked
from dflash_offline.tidy import prune_plan

TRAIN = {"mode": "independent", "epochs": 2}
THREE = """
[[drafters]]
name = "shallow"

[[drafters]]
name = "small.blocks"
block_size = 3
target_layer_ids = [2, 0]
seed = 4

[[drafters]]
name = "broken"
lr = 1e30
"""


def started(output: str) -> list[str]:
    return sorted(re.findall(r"([\w.-]+): started on the CPU", output))


def command(
    folder: Path, *arguments: str, config: Path | None = None, host: str | None = None, **environment: str
) -> "subprocess.Popen[str]":
    """``luigi --module pipelines ...`` in a folder, on two cores, under another host name if one is given."""
    environment = os.environ | environment
    if host is not None:
        told = folder / f"told-{host}"
        told.mkdir()
        (told / "sitecustomize.py").write_text(f"import socket\nsocket.gethostname = lambda: {host!r}\n")
        environment["PYTHONPATH"] = os.pathsep.join([str(told), *filter(None, [environment.get("PYTHONPATH")])])
    options = [] if config is None else ["--config", str(config)]
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    return subprocess.Popen(
        [sys.executable, "-m", "luigi", "--module", "pipelines", *arguments, *options],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )


def run(folder: Path, *arguments: str, status: int = 0) -> str:
    process = command(folder, *arguments)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == status, output
    return output


def cli(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, conversations: list[dict[str, Any]]) -> tuple[Path, str, str]:
    """A run with a drafter that diverges, then without it: folder, and what the two commands printed."""
    folder = tmp_path_factory.mktemp("three")
    corpus, prompts = folder / "corpus.jsonl", folder / "sums.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in conversations[:16]), encoding="utf-8")
    prompts.write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in ("1 + 1?", "What is a prime?"))
    )
    path = write_run_file(
        folder,
        model=tiny_target,
        files=[corpus],
        train=TRAIN,
        evaluate={"prompts": [str(prompts)], "heldout_rows": 2, "heldout_loop_rows": 0},
    )
    text = path.read_text(encoding="utf-8")
    path.write_text(text + THREE, encoding="utf-8")
    failed = run(folder, "DFlashAll", status=30)
    path.write_text(text + THREE[: THREE.index('\n[[drafters]]\nname = "broken"')], encoding="utf-8")
    return folder, failed, run(folder, "DFlashAll")


def test_a_drafter_that_fails_takes_nothing_from_the_others(three: tuple[Path, str, str]) -> None:
    folder, output, _ = three
    names = ["shallow", "small.blocks"]
    assert started(output) == sorted(
        ["corpus", "capture-0", *(f"{stage}-{name}" for stage in ("evaluate", "export") for name in names)]
        + [f"train-{name}-0" for name in (*names, "broken")]
    )
    last = output.splitlines()[-3:]
    assert {line.split(":")[0].split(". ")[1] for line in last[:2]} == set(names), "what there is nevertheless"
    log = folder / "out" / "logs" / "train" / "train-broken-0.log"
    assert re.fullmatch(
        rf"luigi: error: TrainDrafter broken: train-broken-0 failed: .*not finite.*; its log is {re.escape(str(log))}", last[2]
    )
    assert "Traceback" not in output
    said = r"^train-[\w.]+: queued: waits until another drafter's processes leave the CPU cores$"
    assert re.search(said, output, flags=re.MULTILINE), "two cores, three drafters"


def test_the_others_are_ranked_without_being_made_again(three: tuple[Path, str, str]) -> None:
    folder, _, output = three
    assert started(output) == ["report"]
    config = RunConfig.load(folder / "run.toml")
    best, other = ranked(config)
    assert best.length is not None and other.length is not None and best.length >= other.length
    last = output.splitlines()[-7:]
    assert last[0].startswith("drafter: out/exports/") and (folder / last[0].removeprefix("drafter: ") / "model.safetensors").is_file()
    assert last[2] == f"acceptance length: {best.length:.2f}"
    assert last[3] == f"best of 2 drafters: {best.name}{' (intervals overlap)' if is_tied([best, other]) else ''}"
    assert last[4].startswith(f"1. {best.name}: {best.figures()}, out/exports/") and last[5].startswith(f"2. {other.name}: ")
    assert [one.config.drafter.block_size for one in sorted((best, other), key=lambda one: one.name)] == [4, 3]


def test_the_report_ranks_them(three: tuple[Path, str, str]) -> None:
    config = RunConfig.load(three[0] / "run.toml")
    folder = Layout(config.root_dir).report(keys.report_key(config))
    best, other = ranked(config)
    manifest, text = read_manifest(folder, kind="report"), (folder / "report.md").read_text(encoding="utf-8")
    assert [entry["drafter"] for entry in manifest["ranking"]] == [best.name, other.name]
    assert best.interval is not None and best.replay is not None
    row = f"| 1 | {best.name} | {best.length:.3f} | {best.interval[0]:.3f} to {best.interval[1]:.3f} | {best.replay:.3f} |"
    assert row in text
    assert "block_size = 3, target_layer_ids = [2, 0], seed = 4 |" in text
    for name in ("shallow", "small.blocks"):
        assert f"\n## {name}\n" in text and f"\n### {name}: training\n" in text
    assert {"shallow_loss.svg", "small_blocks_loss.svg"} <= set(manifest["files"])
    assert text.count("\n## Capture\n") == 1


def test_each_trained_from_the_one_store_what_its_entry_says(three: tuple[Path, str, str]) -> None:
    config = RunConfig.load(three[0] / "run.toml")
    layout = Layout(config.root_dir)
    assert len(list((layout.root / "captures").iterdir())) == 1
    shapes = {each.name: read_json(layout.drafter(keys.train_key(each)) / "drafter" / "shape.json") for each in config.each_drafter()}
    assert (shapes["shallow"]["block_size"], shapes["shallow"]["target_layer_ids"]) == (4, [0, 1, 2])
    assert (shapes["small.blocks"]["block_size"], shapes["small.blocks"]["target_layer_ids"]) == (3, [2, 0])


def test_prune_keeps_all_drafters_and_deletes_the_one_that_went(three: tuple[Path, str, str]) -> None:
    config = RunConfig.load(three[0] / "run.toml")
    layout = Layout(config.root_dir)
    kept = {layout.drafter(keys.train_key(each)) for each in config.each_drafter()}
    removals = [path for removal in prune_plan([config]) for path in removal.paths]
    assert len(removals) == 1 and removals[0].parent.name == "drafters" and removals[0] not in kept
    checkpoints = [path for removal in prune_plan([config], checkpoints=True, store=True) for path in removal.paths]
    assert {folder / "checkpoints" for folder in kept} | {layout.store(keys.capture_key(config))} <= set(checkpoints)


def test_commands_take_the_drafters_name(three: tuple[Path, str, str]) -> None:
    option = ["--config", str(three[0] / "run.toml")]
    for arguments in (["export"], ["generate", "1 + 1?"], ["evaluate"]):
        assert "several drafters; name one of shallow, small.blocks with --drafter" in cli(*arguments, *option, status=1)
    assert "no drafter is called 'deep'; there are shallow, small.blocks" in cli("export", "--drafter", "deep", *option, status=1)
    assert "zlab" in cli("export", "--drafter", "shallow", *option)
    assert cli("generate", "1 + 1?", "--drafter", "small.blocks", "--max-new-tokens", "4", *option)
    status = json.loads(cli("status", "--json", *option))
    assert {(stage["name"], stage["drafter"]) for stage in status["stages"] if stage["drafter"]} == {
        (stage, name) for stage in ("train", "export", "evaluate") for name in ("shallow", "small.blocks")
    }
    assert {stage["state"] for stage in status["stages"]} == {"complete"}
    processes = {process["name"]: process for process in status["processes"]}
    for name in ("shallow", "small.blocks"):
        for stage in ("train-{}-0", "export-{}", "evaluate-{}"):
            assert processes[stage.format(name)]["ended"], "what a process said last outlives the wait for its place"
    assert cli("report", "--path", *option)
    assert json.loads(cli("plan", "--json", *option))["tokens_to_capture"] == 0


def test_a_drafter_without_a_free_gpu_is_queued_and_says_so(
    three: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is there in name only: its lock is what counts until the drafter starts."""
    folder = three[0]
    text = (folder / "run.toml").read_text(encoding="utf-8")
    path = folder / "queued.toml"
    path.write_text(text.replace('gpus = "cpu"\nranks', "gpus = [0]\nranks").replace("seed = 4", "seed = 5"), encoding="utf-8")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(tempfile, "tempdir", None)
    with gpus.lease(["0"], print):
        process = command(folder, "TrainDrafter", "--drafter", "small.blocks", config=path)
        end = time.monotonic() + 60
        states: dict[tuple[str, str], dict[str, Any]] = {}
        while not any(stage["state"] == "queued" for stage in states.values()):
            assert process.poll() is None and time.monotonic() < end, states
            status = json.loads(cli("status", "--json", "--config", str(path)))
            states = {(stage["name"], stage["drafter"]): stage for stage in status["stages"]}
        assert states["train", "small.blocks"]["state"] == "queued" and states["train", "shallow"]["state"] == "complete"
        assert [found["text"] for found in status["processes"] if found["name"] == "train-small.blocks"] == ["queued: waits for 1 of GPU 0"]
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 30 and "train-small.blocks: queued: waits for 1 of GPU 0" in output
    assert "train-small.blocks-0: started on GPU 0" in output and "luigi: error: TrainDrafter small.blocks: " in output.splitlines()[-1]


def test_a_name_is_asked_of_luigi_too(three: tuple[Path, str, str]) -> None:
    folder = three[0]
    assert "name one of shallow, small.blocks with --drafter" in run(folder, "TrainDrafter", status=1).splitlines()[-1]
    assert started(run(folder, "TrainDrafter", "--drafter", "shallow")) == []


@pytest.mark.parametrize(
    ("intervals", "tied"),
    [
        ([(2.0, 2.4), (1.7, 2.1)], True),
        ([(2.0, 2.4), (1.5, 1.9)], False),
        ([(2.0, 2.4), None, (1.5, 2.0)], True),
        ([None, (1.5, 1.9)], False),
        ([(2.0, 2.4)], False),
    ],
)
def test_drafters_whose_intervals_overlap_are_tied(intervals: list[tuple[float, float] | None], tied: bool) -> None:
    config = RunConfig.model_validate({"target": {"model": "x"}, "corpus": {"files": ["c.jsonl"]}})
    assert is_tied([Ranked(config, 2.0, interval, None, Path("export")) for interval in intervals]) is tied


def test_interval_of_a_mean_is_narrower_than_its_parts() -> None:
    sets = {"a": {"acceptance_length": 2.0, "interval": [1.7, 2.3]}, "b": {"acceptance_length": 3.0, "interval": [2.6, 3.8]}}
    low, high = interval_of_mean(sets) or (0, 0)
    assert low == pytest.approx(2.5 - 0.25) and high == pytest.approx(2.5 + (0.3**2 + 0.8**2) ** 0.5 / 2)
    assert interval_of_mean({}) is None and interval_of_mean({"a": {"acceptance_length": None, "interval": None}}) is None


# ---------------------------------------------------------------- hosts


def test_gpus_of_this_host(tmp_path: Path) -> None:
    text = '[target]\nmodel = "x"\n[corpus]\nfiles = ["a"]\n'
    text += '[hosts.HOST]\ntarget_gpus = [0]\ntrain_gpus = "all"\n[hosts.other]\ntrain_gpus = [7]\n'
    for host, target_gpus, train_gpus in ((socket.gethostname(), [0], "all"), ("yonder", [0, 1, 2, 3, 4], [5, 6, 7])):
        path = tmp_path / "run.toml"
        path.write_text(text.replace("HOST", f'"{host}"'))
        config = RunConfig.load(path)
        assert (config.target.gpus, config.train.gpus) == (target_gpus, train_gpus)
    assert config.on_host("OTHER.example.org").train.gpus == [7]
    assert config.on_host("other2").train.gpus == [5, 6, 7]


class TwoNodes:
    """A run file for two nodes, and the command on each of them. A node has a current folder of its own: Luigi's lock is in it."""

    hosts = ("node-a.cluster", "node-b")
    store: ClassVar = {"part_bytes": 150_000, "shard_bytes": 60_000}

    def __init__(self, folder: Path, model: Path, rows: list[dict[str, Any]], **train: Any) -> None:
        self.folder, self.shared, self.started = folder, folder / "shared", 0
        self.shared.mkdir()
        corpus = self.shared / "corpus.jsonl"
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows[:16]), encoding="utf-8")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        nodes = {"nodes": ["node-a", "node-b.cluster"], "master_address": "127.0.0.1", "master_port": self.port}
        self.run_file = write_run_file(self.shared, model=model, files=[corpus], corpus=runs.CORPUS, store=self.store, train=train | nodes)

    def start(self, *others: str) -> "list[subprocess.Popen[str]]":
        self.started += 1
        folders = {host: self.folder / f"{host}-{self.started}" for host in (*self.hosts, *others)}
        for folder in folders.values():
            folder.mkdir()
        return [command(folder, "TrainDrafter", config=self.run_file, host=host) for host, folder in folders.items()]


@pytest.mark.long  # two nodes that train: test_train_ranks; two processes that capture one store: test_capture
def test_two_hosts_capture_and_train_one_drafter_together(tmp_path: Path, tiny_target: Path, conversations: list[dict[str, Any]]) -> None:
    train = {"epochs": 2, "micro_batches_per_step": 3}
    nodes = TwoNodes(tmp_path, tiny_target, conversations, **train)
    both, path, port, store = nodes.shared, nodes.run_file, nodes.port, nodes.store
    hosts = nodes.start("waits")
    outputs = [process.communicate(timeout=300)[0] for process in hosts]
    assert [process.returncode for process in hosts] == [0, 0, 0], "\n".join(outputs)
    a, b, other = outputs
    assert "train: waits for what node-a, node-b.cluster make; this host is not in [train] nodes" in other
    assert not [name for name in started(other) if name.startswith("train")]
    assert "train-0: started" in a and "train-1: started" not in a and "train-1: started" in b and "train-0: started" not in b
    assert f"train: node 2 of 2, 1 of 2 ranks, which meet at 127.0.0.1:{port}" in b
    captured = [host for host, output in zip((*nodes.hosts, "waits"), outputs, strict=True) if "capture-0: started" in output]
    assert captured and all((both / "out" / "logs" / "capture" / host / "capture-0.log").is_file() for host in captured)
    assert started(a + b + other).count("corpus") == 1
    logs = both / "out" / "logs"
    assert (logs / "train" / "node-a.cluster" / "train-0.log").is_file() and (logs / "train" / "node-b" / "train-1.log").is_file()
    assert read_manifest(runs.drafter_folder(path), kind="drafter")["ranks"] == 2

    alone = runs.make_run(tmp_path / "alone", both, model=tiny_target, store=store, train=train)
    runs.train_here(alone)
    assert len(runs.losses(alone)) > 3
    for (step, loss, norm), (other_step, other_loss, other_norm) in zip(runs.losses(path), runs.losses(alone), strict=True):
        assert step == other_step and loss == pytest.approx(other_loss, rel=2e-5) and norm == pytest.approx(other_norm, rel=2e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "whole_group", "why"),
    [
        (signal.SIGKILL, True, "lost contact with "),
        (signal.SIGTERM, False, r"stopped after step \d+, which is saved, because rank 1 on node-b was told to stop or lost its command"),
    ],
)
def test_a_lost_node_ends_the_others_and_both_go_on_together(
    tmp_path: Path, tiny_target: Path, conversations: list[dict[str, Any]], number: signal.Signals, whole_group: bool, why: str
) -> None:
    nodes = TwoNodes(tmp_path, tiny_target, conversations, epochs=60, checkpoint_every=5)
    first, second = nodes.start()
    end = time.monotonic() + 240
    while not any(row["step"] >= 20 for row in runs.metrics(nodes.run_file)):
        assert first.poll() is None and second.poll() is None and time.monotonic() < end, [first.communicate()[0], second.communicate()[0]]
        time.sleep(0.05)
    (os.killpg if whole_group else os.kill)(second.pid, number)
    second.communicate(timeout=60)
    output = first.communicate(timeout=60)[0]
    assert first.returncode == 30
    assert re.search(rf"^luigi: error: TrainDrafter: train-0 failed: rank 0 of 2: {why}", output.splitlines()[-1]), output
    again = nodes.start()
    done = [process.communicate(timeout=300)[0] for process in again]
    assert [process.returncode for process in again] == [0, 0], "\n".join(done)
    assert re.search(r"^train-0: resuming at step \d+ of", done[0], flags=re.MULTILINE)


@pytest.mark.long
def test_hosts_share_out_independent_drafters(tmp_path: Path, tiny_target: Path, conversations: list[dict[str, Any]]) -> None:
    both = tmp_path / "both"
    both.mkdir()
    (both / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations[:16]), encoding="utf-8")
    path = write_run_file(both, model=tiny_target, files=[both / "corpus.jsonl"], train=TRAIN | {"epochs": 30, "ranks": 2})
    names = ["a", "b", "c", "d"]
    entries = "".join(f'\n[[drafters]]\nname = "{name}"\nseed = {seed}\n' for seed, name in enumerate(names))
    path.write_text(path.read_text(encoding="utf-8") + entries, encoding="utf-8")
    hosts = []
    for host in ("one", "two"):
        (tmp_path / host).mkdir()
        hosts.append(command(tmp_path / host, "DFlashAll", config=path, host=host))
    outputs = [process.communicate(timeout=600)[0] for process in hosts]
    assert [process.returncode for process in hosts] == [0, 0], "\n".join(outputs)
    for stage in ("train", "evaluate", "export"):
        for name in names:
            process = f"train-{name}-1" if stage == "train" else f"{stage}-{name}"
            assert started("".join(outputs)).count(process) == 1, process
    assert all(any(f"train-{name}-0: started" in output for name in names) for output in outputs), "each host took some"
    assert started("".join(outputs)).count("corpus") == started("".join(outputs)).count("report") == 1
    assert all("best of 4 drafters: " in output for output in outputs)
    first = (both / "out" / "logs" / "first-host").read_text()
    for host, output in zip(("one", "two"), outputs, strict=True):
        folder = both / "out" / "logs" / "capture" / ("" if host == first else host)
        assert (folder / "capture-0.log").is_file() == ("capture-0: started" in output), (
            "the first host at a root needs no folder of its own"
        )
