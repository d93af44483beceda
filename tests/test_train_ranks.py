"""Several ranks, and resuming after a kill: real processes, compared to the last bit."""

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs as runs
from safetensors.torch import load_file

# 3 micro-batches a step: two ranks share them unevenly, three ranks have idle ones in a bucket's last step
TRAIN = {
    "epochs": 3,
    "micro_batches_per_step": 3,
    "tokens_per_batch": 640,
    "checkpoint_every": 2,
    "noise": 0.02,
    "lr": 2e-3,
    "log_every": 1,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, conversations: list[dict[str, Any]]) -> Path:
    return runs.make_inputs(tmp_path_factory.mktemp("inputs"), model=tiny_target, conversations=conversations)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, inputs: Path, tiny_target: Path) -> dict[int, Path]:
    """Run files trained to their end without a break, by number of ranks."""
    done = {size: runs.make_run(tmp_path_factory.mktemp(f"ranks{size}"), inputs, model=tiny_target, train=TRAIN) for size in (1, 2, 3)}
    runs.train_here(done[1])
    for size in (2, 3):
        with runs.RankProcesses(*[done[size]] * size) as ranks:
            assert all(status == 0 and not err for status, _, err in ranks.output()), ranks.output()
    return done


def weights(run_file: Path) -> torch.Tensor:
    tensors = load_file(runs.drafter_folder(run_file) / "drafter" / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def heldout_rows(run_file: Path) -> list[Any]:
    return [row["heldout"] for row in runs.metrics(run_file) if "heldout" in row]


@pytest.mark.parametrize("size", [2, 3])
def test_the_number_of_ranks_changes_only_rounding(undisturbed: dict[int, Path], size: int) -> None:
    one, several = runs.losses(undisturbed[1]), runs.losses(undisturbed[size])
    assert len(one) == len(several) > 6
    for (step, loss, norm), (other_step, other_loss, other_norm) in zip(one, several, strict=True):
        assert step == other_step and other_loss == pytest.approx(loss, rel=2e-5) and other_norm == pytest.approx(norm, rel=2e-4)
    assert [row["tokens"] for row in runs.metrics(undisturbed[1]) if "loss" in row] == [
        row["tokens"] for row in runs.metrics(undisturbed[size]) if "loss" in row
    ]
    assert heldout_rows(undisturbed[size])[-1]["loss"] == pytest.approx(heldout_rows(undisturbed[1])[-1]["loss"], rel=1e-4)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 3])
def test_killed_and_resumed_is_the_same_to_the_last_bit(
    undisturbed: dict[int, Path], tmp_path: Path, inputs: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    run_file = runs.make_run(tmp_path, inputs, model=tiny_target, train=TRAIN)
    with runs.RankProcesses(*[run_file] * size) as ranks:
        ranks.wait_for_step(3)
        ranks.signal(signal.SIGKILL)
        assert all(status == -signal.SIGKILL for status, _, _ in ranks.output())
    assert not (runs.drafter_folder(run_file) / "manifest.json").exists()
    if size == 1:
        runs.train_here(run_file)
        said = capsys.readouterr().out
    else:
        with runs.RankProcesses(*[run_file] * size) as ranks:
            finished = ranks.output()
        assert all(status == 0 for status, _, _ in finished), finished
        said = finished[0][1]
    assert "resuming at step" in said
    assert runs.losses(run_file) == runs.losses(undisturbed[size])
    assert heldout_rows(run_file) == heldout_rows(undisturbed[size])
    assert torch.equal(weights(run_file), weights(undisturbed[size]))


def test_a_killed_rank_ends_the_other_with_one_line_and_both_go_on_or_one_alone(
    undisturbed: dict[int, Path], tmp_path: Path, inputs: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = runs.make_run(tmp_path / "both", inputs, model=tiny_target, train=TRAIN)
    with runs.RankProcesses(run_file, run_file) as ranks:
        ranks.wait_for_step(3)
        ranks.processes[1].kill()
        (status, _, err), (killed, _, _) = ranks.output(30)
    assert killed == -signal.SIGKILL and status == 1
    assert err.startswith("error: rank 0 of 2: lost contact with rank 1, whose log says why") and err.count("\n") == 1, err
    assert not (runs.drafter_folder(run_file) / "manifest.json").exists()
    alone = runs.make_run(tmp_path / "alone", inputs, model=tiny_target, train=TRAIN)
    shutil.copytree(runs.drafter_folder(run_file), runs.drafter_folder(alone))

    with runs.RankProcesses(run_file, run_file) as ranks:
        finished = ranks.output()
    assert all(status == 0 for status, _, _ in finished), finished
    assert "resuming at step" in finished[0][1]
    assert runs.losses(run_file) == runs.losses(undisturbed[2])
    assert heldout_rows(run_file) == heldout_rows(undisturbed[2])
    assert torch.equal(weights(run_file), weights(undisturbed[2]))

    runs.train_here(alone)
    assert "with 1 rank in place of 2: same samples in the same order" in capsys.readouterr().out
    rows, expected = runs.metrics(alone), runs.metrics(undisturbed[1])
    assert [row["tokens"] for row in rows if "loss" in row] == [row["tokens"] for row in expected if "loss" in row]
    for (_, loss, _), (_, other, _) in zip(runs.losses(alone), runs.losses(undisturbed[1]), strict=True):
        assert loss == pytest.approx(other, rel=2e-5)


def test_divided_optimiser_state_trains_alike_stops_as_one_and_resumes_with_fewer_ranks(
    undisturbed: dict[int, Path], tmp_path: Path, inputs: Path, tiny_target: Path
) -> None:
    run_file = runs.make_run(tmp_path, inputs, model=tiny_target, train=TRAIN | {"fsdp": True})
    with runs.RankProcesses(*[run_file] * 3) as ranks:
        ranks.wait_for_step(3)
        ranks.processes[2].send_signal(signal.SIGTERM)  # to one of them: all stop, at the same step
        stopped = ranks.output()
    assert [status for status, _, _ in stopped] == [1, 1, 143] and "optimiser state divided among 3 ranks" in stopped[0][1], stopped
    said = [
        re.fullmatch(  # not "SIGTERM", which these have not had
            rf"error: rank {rank} of 3: stopped after step (\d+), which is saved, because rank 2 was told to stop or lost its command; "
            r"run the same command again wherever it was started\n",
            stopped[rank][2],
        )
        for rank in (0, 1)
    ]
    assert said[0] and said[1] and said[0][1] == said[1][1], stopped
    with runs.RankProcesses(*[run_file] * 2) as ranks:
        finished = ranks.output()
    assert [status for status, _, _ in finished] == [0, 0], finished
    assert "with 2 ranks in place of 3" in finished[0][1]
    for (step, loss, norm), (other_step, other, other_norm) in zip(runs.losses(run_file), runs.losses(undisturbed[1]), strict=True):
        assert step == other_step and loss == pytest.approx(other, rel=2e-5) and norm == pytest.approx(other_norm, rel=2e-4)
    assert heldout_rows(run_file)[-1]["loss"] == pytest.approx(heldout_rows(undisturbed[1])[-1]["loss"], rel=1e-4)
    torch.testing.assert_close(weights(run_file), weights(undisturbed[1]), rtol=1e-2, atol=1e-3)


def test_ranks_that_differ_are_told_apart(tmp_path: Path, inputs: Path, tiny_target: Path) -> None:
    """Two ranks of one rendezvous with different run files stop with one line each and do not hang."""
    first = runs.make_run(tmp_path / "a", inputs, model=tiny_target, train=TRAIN)
    second = runs.make_run(tmp_path / "b", inputs, model=tiny_target, train=TRAIN | {"seed": 5})
    with runs.RankProcesses(first, second) as ranks:
        finished = ranks.output()
    assert [status for status, _, _ in finished] == [1, 1], finished
    assert all(err.startswith("error: ranks differ in key: rank 0 has ") and err.count("\n") == 1 for _, _, err in finished), finished
