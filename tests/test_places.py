"""Which GPUs the drafters of a run file may take, and a host's place among its nodes."""

import errno
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_offline import estimate, gpus, smoke
from dflash_offline.config import RunConfig
from dflash_offline.errors import ConfigError, ProcessError
from pipelines import TrainDrafter, places
from pipelines.base import one_line_process_errors

HEAD = '[target]\nmodel = "x"\ngpus = "cpu"\n[corpus]\nfiles = ["c.jsonl"]\n'


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")


def load(folder: Path, train: str, *entries: str, more: str = "") -> RunConfig:
    path = folder / "run.toml"
    drafters = "".join(f"[[drafters]]\n{entry}\n" for entry in entries)
    mode = 'mode = "independent"\n' if entries else ""
    path.write_text(f"{HEAD}[train]\n{mode}{train}\n{more}\n{drafters}")
    (folder / "c.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 3)
    return RunConfig.load(path)


def share(config: RunConfig, name: str) -> places.Share:
    return places.training_share(config, name, locks=Path("locks"))


@pytest.mark.parametrize(
    ("gpus", "entries", "name", "count", "among"),
    [
        ("[0, 1, 2]", ['name = "a"', 'name = "b"'], "a", 1, "012"),
        ("[0, 1]", ['name = "a"', 'name = "b"', 'name = "c"'], "c", 1, "01"),
        ('"all"', ['name = "a"', 'name = "b"', 'name = "c"'], "a", 2, "01234567"),
        ('"all"', ['name = "a"\ngpus = [6, 7]', 'name = "b"', 'name = "c"'], "a", 2, "67"),
        ('"all"', ['name = "a"\ngpus = [6, 7]', 'name = "b"', 'name = "c"'], "b", 3, "012345"),
        ("[5]", ['name = "a"\ngpus = "all"'], "a", 8, "01234567"),
    ],
)
def test_gpus_are_dealt_out_evenly_and_own_ones_left_alone(
    tmp_path: Path, gpus: str, entries: list[str], name: str, count: int, among: str
) -> None:
    config = load(tmp_path, f"gpus = {gpus}", *entries)
    found = share(config, name)
    assert (found.count, found.processes, "".join(map(str, found.gpus.values()))) == (count, count, among)
    evaluated = places.evaluation_share(config, name, locks=Path("locks"))
    assert (evaluated.count, evaluated.gpus) == (1, found.gpus)


def test_a_cpu_has_places_for_whole_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    config = load(tmp_path, 'gpus = "cpu"\nranks = 2', *[f'name = "{name}"' for name in "abcd"], 'name = "e"\nranks = 9')
    found = share(config, "a")
    assert (len(found.gpus), found.count, found.processes, found.peers) == (3, 1, 2, 6)
    assert (len(share(config, "e").gpus), share(config, "e").processes) == (1, 9), "one at a time, however many ranks"
    assert len(places.evaluation_share(config, "a", locks=Path("locks")).gpus) == 5


def test_a_drafter_that_waits_for_cores_says_what_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)))
    config = load(tmp_path, 'gpus = "cpu"\nranks = 2', 'name = "a"', 'name = "b"')
    said: list[str] = []

    def tick() -> None:
        raise TimeoutError

    first, second = (places.training_share(config, name, locks=tmp_path) for name in "ab")
    with first.hold(said.append, tick=tick), pytest.raises(TimeoutError), second.hold(said.append, tick=tick):
        pytest.fail("both hold the two cores")
    assert said == ["queued: waits until another drafter's processes leave the CPU cores"]


def test_gpus_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(tmp_path, 'gpus = "all"', 'name = "a"\ngpus = [0, 9]', 'name = "b"')
    with pytest.raises(ConfigError, match=r"\[\[drafters\]\] a: gpus = \[0, 9\]: .* there is no GPU 9"):
        share(config, "a")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = load(tmp_path, 'gpus = "all"', 'name = "a"\ngpus = [0]', 'name = "b"')
    with pytest.raises(ConfigError, match="every GPU of this host is named by an entry of .*, so b has none"):
        share(config, "b")


@pytest.mark.parametrize(("train", "entries"), [("gpus = [1, 0]", ()), ("gpus = [1]", ('name = "a"\ngpus = [0]', 'name = "b"'))])
def test_a_setting_that_its_gpu_lacks_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], train: str, entries: tuple[str, ...]
) -> None:
    monkeypatch.setattr(gpus, "_listed", lambda: {"0": "GPU-a", "1": "GPU-b"})
    monkeypatch.setattr(gpus, "_capabilities", lambda: {"GPU-a": (8, 0), "GPU-b": (9, 0)})
    config = load(tmp_path, f'head_precision = "fp8"\n{train}', *entries)
    name = "a" if entries else ""
    task = SimpleNamespace(drafter=name, run_config=config.for_drafter(name), share=lambda: share(config, name), waits_for_nodes=False)
    with pytest.raises(SystemExit, match=r'^luigi: error: .* head_precision = "fp8" needs a GPU with fp8 .* \(GPU 0\)$'):
        TrainDrafter.requires(task)  # type: ignore[arg-type]


def test_a_host_finds_its_place_among_the_nodes(tmp_path: Path) -> None:
    here = socket.gethostname()
    more = "[hosts.first]\ntrain_gpus = [0, 1]\n"
    node = places.node_of_this_host(load(tmp_path, f'gpus = [4, 5, 6]\nnodes = ["first", "{here}"]', more=more))
    assert node == places.Node(1, 2, 5, "first", 29500)
    assert places.node_of_this_host(load(tmp_path, 'nodes = ["first"]', more=more)) is None
    assert places.node_of_this_host(load(tmp_path, "gpus = [0]")) is None


def test_the_first_host_needs_no_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for host, expected in (("one", True), ("two", False), ("one", True)):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        places.came_first.cache_clear()
        assert places.came_first(tmp_path / "logs") is expected
    places.came_first.cache_clear()


def test_training_time_counts_what_queues(tmp_path: Path) -> None:
    names = [f'name = "{name}"' for name in "abcd"]
    config = load(tmp_path, "gpus = [0, 1]\nepochs = 1", *names[:3], 'name = "own"\ngpus = [7]\nepochs = 4')
    alone = estimate._training_s(load(tmp_path, "gpus = [0, 1]\nepochs = 1"), 1000, 10.0)
    assert estimate._training_s(config, 1000, 10.0) == pytest.approx(4 * alone), "the longest, on a GPU of its own"
    config = load(tmp_path, "gpus = [0, 1]\nepochs = 1", *names)
    assert estimate._training_s(config, 1000, 10.0) == pytest.approx(2 * alone), "four on two GPUs"


def test_smoke_takes_all_drafters_for_few_steps_on_this_host(tmp_path: Path) -> None:
    nodes = load(tmp_path, 'gpus = [0]\nnodes = ["elsewhere"]', more='[hosts."a.b"]\ntrain_gpus = [3]')
    several = load(tmp_path, "gpus = [0]", 'name = "a"\nmax_steps = 900\nlog_every = 50', 'name = "b"\nlayers = 3\ntarget_layer_ids = [1]')
    for config in (nodes, several):
        path = tmp_path / "smoke.toml"
        path.write_text(smoke.reduced_run_file(config, corpus=tmp_path / "c.jsonl", rows=3, steps=7))
        reduced = RunConfig.load(path)
        assert reduced.drafter_names == config.drafter_names and reduced.train.nodes == [] and reduced.hosts == config.hosts
        assert {(each.train.max_steps, each.train.log_every) for each in reduced.each_drafter()} == {(7, 1)}
    assert reduced.for_drafter("b").drafter.layers == 3


def test_a_full_disk_is_called_so(tmp_path: Path) -> None:
    with (
        pytest.raises(ProcessError, match="the disk is full; make space and run the same command again"),
        one_line_process_errors(tmp_path),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
