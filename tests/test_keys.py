"""Content keys: which change reaches which stage, and which reaches none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_offline import keys
from dflash_offline.config import DrafterConfig, RunConfig, TrainConfig
from dflash_offline.errors import ConfigError

STAGES: dict[str, Callable[[RunConfig], str]] = {
    "corpus": keys.corpus_key,
    "capture": keys.capture_key,
    "train": keys.train_key,
    "export": keys.export_key,
    "evaluate": keys.evaluate_key,
    "report": keys.report_key,
}
TRAIN_ON = {"train", "export", "evaluate", "report"}
CAPTURE_ON = {"capture"} | TRAIN_ON
CORPUS_ON = {"corpus"} | TRAIN_ON  # rows are addressed by content: a corpus that grew keeps its store
ALL = set(STAGES)


class Run:
    """A run folder whose sections can be changed one setting at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        target = folder / "target"
        target.mkdir()
        (target / "config.json").write_text(json.dumps({"num_hidden_layers": 24}))
        (target / "model.safetensors").write_bytes(b"weights")
        (target / "tokenizer.json").write_text("{}")
        (folder / "corpus.jsonl").write_text('{"a": 1}\n')
        (folder / "prompts.jsonl").write_text('{"p": 1}\n')
        (folder / "mine.jinja").write_text("{{ messages }}")

    def keys(self, text: str = "", **sections: dict[str, Any]) -> dict[str, str]:
        tables: dict[str, dict[str, Any]] = {
            "target": {"model": "target", "capture_layer_ids": 5},
            "corpus": {"files": ["corpus.jsonl"]},
            "evaluate": {"prompts": ["prompts.jsonl"]},
        }
        for name, settings in sections.items():
            tables[name] = tables.get(name, {}) | settings
        lines = [text]
        for name, settings in tables.items():
            lines.append(f"[{name}]")
            lines.extend(f"{key} = {self._toml(value)}" for key, value in settings.items())
        path = self.folder / "run.toml"
        path.write_text("\n".join(lines) + "\n")
        config = RunConfig.load(path)
        return {name: key(config) for name, key in STAGES.items()}

    @staticmethod
    def _toml(value: Any) -> str:
        if isinstance(value, dict):
            return "{ " + ", ".join(f"{name} = {json.dumps(item)}" for name, item in value.items()) + " }"
        return json.dumps(value)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in STAGES if before[name] != after[name]}


def test_keys_are_sixteen_hex_digits_and_differ(run: Run) -> None:
    found = run.keys()
    assert all(len(key) == 16 and int(key, 16) >= 0 for key in found.values())
    assert len(set(found.values())) == len(STAGES)
    assert run.keys() == found


@pytest.mark.parametrize(
    ("section", "setting", "expected"),
    [
        # never: machines, workers, logs, paths, how a thing is computed
        ("target", {"gpus": "cpu", "replicas": 3}, set()),
        ("target", {"attention": "eager", "compile": False}, set()),
        ("corpus", {"tokens_per_batch": 9000, "strict": True}, set()),
        ("store", {"part_bytes": 10, "shard_bytes": 10, "chunk_tokens": 8, "verify": "off"}, set()),
        ("train", {"gpus": [0], "ranks": 2, "attention": "sdpa"}, set()),
        ("train", {"checkpoint_every": 3, "checkpoint_minutes": 1.0, "keep_checkpoints": 9, "evaluate_every": 7, "log_every": 1}, set()),
        ("train", {"min_tokens_per_s": 5.0}, set()),
        ("evaluate", {"gpus": [3]}, set()),
        # a default written out is the default
        ("target", {"capture_layer_ids": [1, 6, 11, 16, 21]}, set()),
        ("drafter", {"target_layer_ids": [1, 6, 11, 16, 21]}, set()),
        ("train", {"lr": 6e-4, "epochs": 6}, set()),
        # each stage and those after it
        ("corpus", {"heldout_fraction": 0.1}, CORPUS_ON),
        ("corpus", {"max_length": 4096}, CORPUS_ON),
        ("corpus", {"supervise": "last"}, CORPUS_ON),
        ("corpus", {"chat_template": "mine.jinja"}, ALL),
        ("corpus", {"chat_template_kwargs": {"enable_thinking": False}}, ALL),
        ("target", {"dtype": "float32"}, CAPTURE_ON),
        ("target", {"capture_layer_ids": [1, 6, 11, 16]}, CAPTURE_ON),
        ("target", {"capture_layer_ids": [6, 1, 11, 16, 21]}, CAPTURE_ON),
        ("store", {"codec": "lossless"}, CAPTURE_ON),
        ("store", {"zstd": True}, CAPTURE_ON),
        ("store", {"store_last_hidden": True}, CAPTURE_ON),
        ("drafter", {"layers": 3}, TRAIN_ON),
        ("drafter", {"mask_token_id": 7}, TRAIN_ON),
        ("drafter", {"target_layer_ids": [1, 6]}, TRAIN_ON),
        ("drafter", {"target_layer_ids": [6, 1, 11, 16, 21]}, TRAIN_ON),
        ("train", {"lr": 1e-3}, TRAIN_ON),
        ("train", {"seed": 1}, TRAIN_ON),
        ("train", {"dtype": "float32"}, TRAIN_ON),
        ("export", {"formats": ["speculators"]}, {"export", "report"}),
        ("export", {"license": "mit"}, {"export", "report"}),
        ("evaluate", {"max_new_tokens": 5}, {"evaluate", "report"}),
        ("evaluate", {"prompts": []}, {"evaluate", "report"}),
    ],
)
def test_a_setting_reaches_its_stage_and_the_later_ones_only(run: Run, section: str, setting: dict[str, Any], expected: set[str]) -> None:
    assert changed(run.keys(), run.keys(**{section: setting})) == expected


@pytest.mark.parametrize("codec", ["bf16", "lossless"])
def test_zstd_of_codes_changes_nothing_where_there_are_none(run: Run, codec: str) -> None:
    """It would have everything captured again, for the same bytes."""
    assert run.keys(store={"codec": codec, "zstd": True}) == run.keys(store={"codec": codec})


@pytest.mark.parametrize(
    ("section", "setting", "switch"),
    [
        ("corpus", {"num_buckets": 3}, {"bucket_edges": "auto"}),
        ("train", {"gamma": 3.0}, {"loss": "dpace"}),
        ("train", {"dpace_alpha": 0.3}, {"loss": "ce"}),
        ("train", {"noise_schedule": "cosine"}, {"noise": 0.0}),
    ],
)
def test_a_setting_that_another_one_switches_off_is_in_no_key(
    run: Run, section: str, setting: dict[str, Any], switch: dict[str, Any]
) -> None:
    others = {"bucket_edges": [770, 8193], "loss": "ce" if switch.get("loss") == "dpace" else "dpace", "noise": 0.1}
    other = {name: others[name] for name in switch}
    off, on = (other, switch) if section == "corpus" else (switch, other)
    assert run.keys(**{section: off}) == run.keys(**{section: off | setting})
    assert changed(run.keys(**{section: on}), run.keys(**{section: on | setting})) == (CORPUS_ON if section == "corpus" else TRAIN_ON)


def test_keys_stay_what_they_are_from_release_to_release(run: Run) -> None:
    """Results made before must be found again: what changes these makes users capture and train anew.

    Two defaults have changed since: a run file that names the old values still finds its results.
    """
    assert run.keys(store={"codec": "lossless"}, train={"tokens_per_batch": 8192}) == {
        "corpus": "6e1870895e8d694b",
        "capture": "066b394f98064672",
        "train": "d81c1021750e82bf",
        "export": "ed6721d78a264c29",
        "evaluate": "9975303cfade6ca3",
        "report": "27491cb369336c26",
    }


def test_every_training_setting_is_in_the_key_unless_the_table_says_not(run: Run) -> None:
    """A field added to [train] or [drafter] cannot be forgotten."""
    assert not keys.NOT_IN_TRAIN_KEY - set(TrainConfig.model_fields)
    other: dict[str, Any] = {"head_precision": "fp8", "schedule": "wsd", "loss": "dpace", "noise_schedule": "cosine", "betas": [0.8, 0.9]}
    needs: dict[str, dict[str, Any]] = {"dpace_alpha": {"loss": "dpace"}, "noise_schedule": {"noise": 0.5}}  # else it has no effect
    needs["head_precision"] = {"gpus": [0]}  # else it is refused
    for name, field in TrainConfig.model_fields.items():
        if name in keys.NOT_IN_TRAIN_KEY or name in ("dtype", "kl_weight"):
            continue
        if name in other:
            value = other[name]
        elif isinstance(field.default, bool):
            value = not field.default
        elif isinstance(field.default, int):
            value = field.default + 1
        elif isinstance(field.default, float):
            value = field.default / 2 + 0.01
        elif field.default is None:
            value = 0.5 if "float" in str(field.annotation) else 7
        else:
            pytest.fail(f"[train] {name}: give this test another value for it")
        needed = needs.get(name, {})
        assert changed(run.keys(train=needed), run.keys(train=needed | {name: value})) == TRAIN_ON, name
    assert set(DrafterConfig.model_fields) >= {"layers", "block_size"}


def test_a_drafter_among_several_has_the_keys_it_has_alone(run: Run) -> None:
    """Names, and what is trained beside it, are in no key but the report's."""
    plain = run.keys(drafter={"layers": 3}, train={"lr": 1e-3})
    run.keys(train={"lr": 1e-3})
    path = run.folder / "run.toml"
    text = path.read_text().replace("[train]\n", '[train]\nmode = "independent"\n')

    def several(entries: str) -> RunConfig:
        path.write_text(text + entries)
        return RunConfig.load(path)

    first = '[[drafters]]\nname = "a"\nlayers = 3\n'
    config = several(first + '[[drafters]]\nname = "b"\nlayers = 3\nseed = 1\ngpus = [1]\n')
    a, b = config.each_drafter()
    for name, key_of in STAGES.items():
        if name != "report":
            assert key_of(a) == plain[name], name
            assert (key_of(b) == plain[name]) == (name in ("corpus", "capture"))
    assert keys.report_key(config) != keys.report_key(several(first))
    with pytest.raises(ConfigError, match=r"run\.toml: it has several drafters; name one of a, b with --drafter"):
        keys.train_key(config)
    with pytest.raises(ConfigError, match=r"run\.toml: \[\[drafters\]\] a and b are the same drafter; remove one of them"):
        keys.report_key(several(first + '[[drafters]]\nname = "b"\nlayers = 3\ngpus = [1]\nlog_every = 3\n'))
    with pytest.raises(
        ConfigError, match=r"run\.toml: \[\[drafters\]\] a: target_layer_ids names \[2\]; captured are \[1, 6, 11, 16, 21\]"
    ):
        keys.report_key(several('[[drafters]]\nname = "a"\ntarget_layer_ids = [2]\n'))


def test_hosts_and_nodes_are_in_no_key(run: Run) -> None:
    before = run.keys()
    assert run.keys(**{"hosts.node-1": {"target_gpus": [0], "train_gpus": [1]}}, train={"nodes": ["node-1"], "master_port": 5}) == before


def test_comments_order_and_spaces_change_nothing(run: Run) -> None:
    before = run.keys(train={"lr": 1e-3, "seed": 5})
    assert run.keys("# a comment\n\n", train={"seed": 5, "lr": 0.001}) == before


def test_root_is_in_no_key(run: Run) -> None:
    assert run.keys('root = "elsewhere"') == run.keys()


def test_a_moved_run_has_the_same_keys(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = run.keys(corpus={"chat_template": "mine.jinja"})
    elsewhere = Run(tmp_path_factory.mktemp("elsewhere"))
    (elsewhere.folder / "corpus.jsonl").rename(elsewhere.folder / "other.jsonl")
    (elsewhere.folder / "mine.jinja").rename(elsewhere.folder / "yours.jinja")
    assert elsewhere.keys(corpus={"files": ["other.jsonl"], "chat_template": "yours.jinja"}) == before


def test_new_rows_need_no_new_store(run: Run) -> None:
    before = run.keys()
    with (run.folder / "corpus.jsonl").open("a") as file:
        file.write('{"a": 2}\n')
    assert changed(before, run.keys()) == CORPUS_ON


def test_new_prompts_are_only_evaluated(run: Run) -> None:
    before = run.keys()
    (run.folder / "prompts.jsonl").write_text('{"p": 2}\n')
    assert changed(before, run.keys()) == {"evaluate", "report"}


def test_another_target_or_tokenizer_reaches_the_right_stages(run: Run) -> None:
    before = run.keys()
    (run.folder / "target" / "model.safetensors").write_bytes(b"weights, tuned")
    assert changed(before, run.keys()) == CAPTURE_ON
    before = run.keys()
    (run.folder / "target" / "tokenizer.json").write_text('{"x": 1}')
    assert changed(before, run.keys()) == ALL
    before = run.keys()
    (run.folder / "mine.jinja").write_text("another")
    assert changed(before, run.keys()) == set(), "a template that is not used"


def test_store_identity_has_a_name_for_each_difference(run: Run) -> None:
    run.keys()
    found = keys.store_identity(RunConfig.load(run.folder / "run.toml"))
    assert {"target_config", "target_weights", "tokenizer", "template", "layer_ids", "dtype", "codec", "zstd", "store_last_hidden"} <= set(
        found
    )
    json.dumps(found)
