"""The stages export and evaluate on a run whose corpus, store and drafter are real: prepared, captured and trained here."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_offline import checkpoint, keys
from dflash_offline.config import RunConfig
from dflash_offline.errors import EvaluateError, ExportError
from dflash_offline.evaluate import Loop
from dflash_offline.evaluate import __main__ as evaluate_main
from dflash_offline.evaluate.stage import heldout_rows, precision, report_lines
from dflash_offline.export import __main__ as export_main
from dflash_offline.export import export, load_trained, read_drafter
from dflash_offline.layout import Layout
from dflash_offline.manifest import read_manifest
from dflash_offline.progress import Progress
from dflash_offline.replay import ReplayResult, replay
from dflash_offline.target import load_embedding_and_head


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, conversations: list[dict[str, Any]]) -> Path:
    """A run file whose corpus, capture and training are done."""
    from conftest import write_run_file

    from dflash_offline.capture.replica import Replica
    from dflash_offline.corpus.__main__ import prepare_corpus
    from dflash_offline.train import train

    folder = tmp_path_factory.mktemp("run")
    rows = sorted(conversations, key=lambda row: sum(len(message["content"]) for message in row["messages"]))[:14]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name in ("a", "b"):
        (folder / f"eval-{name}.jsonl").write_text(json.dumps({"prompt": f"what is {name}?"}) + "\n", encoding="utf-8")
    path = write_run_file(
        folder,
        model=tiny_target,
        files=[folder / "corpus.jsonl"],
        corpus={"heldout_fraction": 0.25},
        train={"checkpoint_every": 2, "epochs": 2, "ema": 0.5},
        evaluate={"prompts": [str(folder / "eval-*.jsonl")], "max_new_tokens": 8, "heldout_rows": 2},
        export={"formats": ["zlab", "speculators"], "license": "mit"},
    )
    config, progress = RunConfig.load(path), Progress(None)
    prepare_corpus(config, Namespace(key=keys.corpus_key(config), strict=False), progress)
    Replica(config, capture_key=keys.capture_key(config), replica=0, replicas=1, progress=progress).run()
    train(config, Namespace(key=keys.train_key(config)), progress)
    return path


def test_export_stage(run_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = RunConfig.load(run_path)
    key = keys.export_key(config)
    export_main.main(["--config", str(run_path), "--key", key])
    folder = Layout(config.root_dir).export(key)
    manifest = read_manifest(folder, kind="export")
    assert manifest["formats"] == ["zlab", "speculators"] and all(check["passed"] for check in manifest["conformance"]["zlab"])
    assert "7 of 7 conformance checks passed" in capfd.readouterr().out
    shape, tensors = load_trained(Layout(config.root_dir).drafter(keys.train_key(config)))
    for form in ("zlab", "speculators"):
        read = read_drafter(folder / form)  # the verifier is a folder here, so even the speculators form says its layers
        assert read.shape == shape
        assert all(torch.equal(read.tensors[name], tensor.to(torch.bfloat16)) for name, tensor in tensors.items())
        card = (folder / form / "README.md").read_text()
        assert "license: mit" in card and "vllm serve" in card and "corpus.jsonl" in card and "epochs" in card
        assert json.loads((folder / form / "training.json").read_text())["chat_template_kwargs"] == {}


def test_export_of_a_checkpoint(run_path: Path, tmp_path: Path) -> None:
    config = RunConfig.load(run_path)
    trained = Layout(config.root_dir).drafter(keys.train_key(config))
    final = load_trained(trained)[1]
    seen = {}
    earlier, last = checkpoint.steps(trained / "checkpoints")
    for step in (earlier, last):
        export(config, keys.export_key(config), Progress(None), step=step, folder=tmp_path / str(step))
        seen[step] = read_drafter(tmp_path / str(step) / "zlab").tensors
    assert all(torch.equal(seen[last][name], tensor.to(torch.bfloat16)) for name, tensor in final.items()), (
        "the average, as in the final weights"
    )
    assert not torch.equal(seen[earlier]["fc.weight"], seen[last]["fc.weight"])
    with pytest.raises(ExportError, match=rf"no checkpoint of step 3; there are {earlier}, {last}$"):
        export(config, keys.export_key(config), Progress(None), step=3, folder=tmp_path / "3")
    wider = config.model_copy(update={"drafter": config.drafter.model_copy(update={"intermediate_size": 256})})
    state = trained.parent / keys.train_key(wider)
    state.symlink_to(trained)
    with pytest.raises(ExportError, match="other drafter sizes"):
        export(wider, "x", Progress(None), step=last, folder=tmp_path / "wider")
    state.unlink()


def test_evaluate_stage(run_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = RunConfig.load(run_path)
    key = keys.evaluate_key(config)
    evaluate_main.main(["--config", str(run_path), "--key", key])
    said = capfd.readouterr().out
    folder = Layout(config.root_dir).evaluation(key)
    results = json.loads((folder / "results.json").read_text())
    assert read_manifest(folder, kind="evaluation")["overall"] == results["overall"]
    assert set(results["datasets"]) == {"a", "b"} and results["overall"]["different"] == 0
    assert results["overall"]["identical"] + results["overall"]["near_ties"] == 2
    for result in results["datasets"].values():
        assert result["speedup"] > 0 and len(result["accepted_per_slot"]) == 3 and 0 < result["verify_share"] < 1
        assert result["acceptance_length"] == result["tokens"] / result["steps"] >= 1
    assert "overall acceptance length" in said and "tau_replay on 2 held-out rows" in said

    # tau_replay once more, from the store's rows by hand
    shape, tensors = load_trained(Layout(config.root_dir).drafter(keys.train_key(config)))
    from dflash_offline.evaluate import make_drafter

    drafter = make_drafter(shape, tensors, device=torch.device("cpu"), dtype=torch.float32)
    embedding, head = load_embedding_and_head(config.path(config.target.model), dtype=torch.float32, device="cpu")
    rows = heldout_rows(config, shape)
    replayed = ReplayResult.pooled(replay(drafter, embedding, head, row.read_hidden(), row.input_ids, row.loss_mask) for row in rows)
    assert (results["tau_replay"]["tokens"], results["tau_replay"]["steps"]) == (replayed.tokens, replayed.steps)
    assert all(isinstance(row.input_ids, np.ndarray) and row.read_hidden().shape == (len(row.input_ids), 3 * 64) for row in rows)


@pytest.mark.parametrize("last", ["export", "evaluate"])
def test_the_card_has_the_acceptance_table_whichever_stage_ends_last(run_path: Path, tmp_path: Path, last: str) -> None:
    """The two run side by side; here one after the other, in either order, in a copy of the run."""
    import shutil

    from dflash_offline.evaluate.stage import evaluate

    shutil.copytree(run_path.parent, tmp_path / "run")
    config = RunConfig.load(tmp_path / "run" / "run.toml")
    layout = Layout(config.root_dir)
    for made in (layout.export(keys.export_key(config)), layout.evaluation(keys.evaluate_key(config))):
        shutil.rmtree(made, ignore_errors=True)
    stages = {
        "export": lambda: export(config, keys.export_key(config), Progress(None)),
        "evaluate": lambda: evaluate(config, keys.evaluate_key(config), Progress(None)),
    }
    first = next(name for name in stages if name != last)
    cards = [layout.export(keys.export_key(config)) / form / "README.md" for form in ("zlab", "speculators")]
    stages[first]()
    if first == "export":
        assert all("Not measured" in card.read_text() for card in cards)
    stages[last]()
    results = json.loads((layout.evaluation(keys.evaluate_key(config)) / "results.json").read_text())
    for card in cards:
        text = card.read_text()
        assert f"| a | {results['datasets']['a']['acceptance_length']:.2f} |" in text and "Not measured" not in text
        assert "license: mit" in text and "vllm serve" in text and "corpus.jsonl" in text and "epochs" in text


def test_an_output_that_is_not_the_targets_own_fails_the_stage(
    run_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig.load(run_path)
    changed = run_path.with_name("other.toml")
    changed.write_text(run_path.read_text().replace("max_new_tokens = 8", "max_new_tokens = 9"), encoding="utf-8")
    original = Loop.run

    def careless(self: Loop, *args: Any, plain: bool, **options: Any) -> Any:
        for name, response in original(self, *args, plain=plain, **options):
            if not plain:
                response.tokens[3] = (response.tokens[3] + 100) % 500
            yield name, response

    monkeypatch.setattr(Loop, "run", careless)
    with pytest.raises(SystemExit) as left:
        evaluate_main.main(["--config", str(changed)])
    out = capfd.readouterr()
    assert left.value.code == 1 and "error: the loop's output is not the target's own greedy output: 1 of a, 1 of b" in out.err
    assert "DIFFERENT" in out.out and "token 3" in out.out
    folder = Layout(config.root_dir).evaluation(keys.evaluate_key(RunConfig.load(changed)))
    assert (folder / "results.json").exists() and not (folder / "manifest.json").exists()


def test_precision_follows_the_device(run_file: Callable[..., Path]) -> None:
    config = RunConfig.load(run_file(rows=2, target={"dtype": "bfloat16"}))
    assert precision(config, torch.device("cpu")) == torch.float32 and precision(config, torch.device("cuda")) == torch.bfloat16
    chosen = RunConfig.load(run_file(rows=2, target={"dtype": "float32"}, evaluate={"dtype": "bfloat16"}))
    assert precision(chosen, torch.device("cpu")) == torch.bfloat16


def test_one_answer_is_called_so() -> None:
    pair = {"reproduced": 1, "replay": 1.5, "loop": 1.5}
    results: dict[str, Any] = {"datasets": {}, "device": "cpu", "tau_replay": {"rows": 1, "tau": 1.25, "loop": pair}}
    told = "tau_replay on 1 held-out row: 1.250; on 1 answer the target writes again: replay 1.500, real loop 1.500"
    assert report_lines(results) == [told]
    pair["reproduced"] = 2
    assert "; on 2 answers the target" in report_lines(results)[0]


def test_it_is_said_that_the_real_loop_could_not_be_compared() -> None:
    pair = {"rows": 4, "reproduced": 0, "replay": None, "loop": None}
    replayed: dict[str, Any] = {"rows": 7, "tau": 1.25, "loop": pair}
    results: dict[str, Any] = {"datasets": {}, "device": "cpu", "tau_replay": replayed}
    (line,) = report_lines(results)
    assert line.startswith(
        "tau_replay on 7 held-out rows: 1.250; of 4 held-out answers none was written again by the target token by token"
    )
    assert "[evaluate] heldout_loop_rows" in line
    replayed["loop"] = None  # heldout_loop_rows = 0
    assert report_lines(results) == ["tau_replay on 7 held-out rows: 1.250"]


def test_a_gpu_that_is_not_there_is_refused(run_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    from dflash_offline.evaluate import load_decoder

    config = RunConfig.load(run_path)
    shape, tensors = load_trained(Layout(config.root_dir).drafter(keys.train_key(config)))
    with pytest.raises(EvaluateError, match="sees no GPU"):
        load_decoder(config.path(config.target.model), shape, tensors, device="cuda:0", dtype=torch.float32)
