"""The run file: what is accepted, what is refused and in which words, and how its paths are resolved."""

import pwd
import socket
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from dflash_offline import fields
from dflash_offline.config import EMBEDDED, DrafterConfig, RunConfig, TrainConfig
from dflash_offline.config.drafters import OF_THE_WHOLE_RUN, known_settings
from dflash_offline.errors import ConfigError

MINIMAL = {"target": {"model": "target"}, "corpus": {"files": ["corpus.jsonl"]}}


def load(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return RunConfig.load(path)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert "\n" not in message
    return message


def with_setting(section: str, line: str) -> str:
    """A minimal run file with one more line in a section."""
    lines = {"target": ['model = "target"'], "corpus": ['files = ["corpus.jsonl"]']}
    lines.setdefault(section, []).append(line)
    return "\n".join(f"[{name}]\n" + "\n".join(inside) for name, inside in lines.items())


def test_minimal_run_file_has_the_documented_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, with_setting("target", ""))
    assert config.target.gpus == [0, 1, 2, 3, 4]
    assert config.train.gpus == [5, 6, 7]
    assert config.corpus.bucket_edges == [770, 1216, 1728, 2432, 3296, 8193]
    assert (config.drafter.layers, config.drafter.block_size, config.train.anchors) == (5, 16, 512)
    assert config.source == tmp_path / "run.toml"
    assert config.root_dir == tmp_path / "dflash-run"


def test_embedded_run_file_is_the_one_promised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig.load(EMBEDDED)
    assert config.root_dir == tmp_path / "dflash-run", "the embedded file's root is in the current folder"
    assert (config.target.model, config.target.gpus, config.target.dtype, config.target.replicas) == ("demo:smollm2", "cpu", "float32", 2)
    assert (config.train.gpus, config.train.ranks, config.train.dtype) == ("cpu", 2, "float32")
    assert (config.drafter.layers, config.drafter.block_size, config.drafter.mask_token_id) == (2, 8, 16)
    assert config.corpus.bucket_edges == [128, 256, 384, 512]
    assert 32 <= config.train.anchors <= 64
    assert config.files(config.corpus.files, where="x")[0].name == "demo-conversations.jsonl.gz"
    assert config.files(config.evaluate.prompts, where="x")[0].name == "demo-prompts.jsonl"


def test_every_field_is_documented() -> None:
    def walk(model: type[BaseModel], where: str) -> None:
        assert model.__doc__, where
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                walk(field.annotation, f"{where}.{name}")
            else:
                assert field.description and field.description.endswith("."), f"{where}.{name} has no sentence that describes it"
                assert fields.allowed(field), name
                assert field.default is not PydanticUndefined or name in ("model", "files"), f"{where}.{name} has no default"

    walk(RunConfig, "run")


@pytest.mark.parametrize(
    ("section", "line", "expected"),
    [
        ("train", "lrr = 1e-3", "run.toml: [train]: unknown key 'lrr'; did you mean 'lr'?"),
        ("target", "lr = 1e-3", "run.toml: [target]: unknown key 'lr'; it belongs to [train]"),
        ("export", "zzz = 1", "run.toml: [export]: unknown key 'zzz'; known are formats, license, target_name"),
        ("trian", "lr = 1e-3", "run.toml: unknown section 'trian'; did you mean 'train'?"),
        ("target", 'gpus = "foo"', 'run.toml: [target]: gpus = \'foo\': must be a list of whole numbers, "all" or "cpu"'),
        ("target", 'gpus = ["0"]', 'run.toml: [target]: gpus = [\'0\']: must be a list of whole numbers, "all" or "cpu"'),
        ("target", "gpus = [true]", 'run.toml: [target]: gpus = [True]: must be a list of whole numbers, "all" or "cpu"'),
        ("target", "gpus = []", 'run.toml: [target]: gpus is an empty list; name GPUs, or "all", or "cpu"'),
        ("evaluate", "gpus = []", 'run.toml: [evaluate]: gpus is an empty list; name GPUs, or "all", or "cpu"'),
        ("target", "gpus = [1, 1]", "run.toml: [target]: gpus = [1, 1]: every GPU once, counted from 0"),
        ("target", "gpus = [-1]", "run.toml: [target]: gpus = [-1]: every GPU once, counted from 0"),
        ("target", "capture_layer_ids = 0", "[target]: capture_layer_ids = 0: must be a list of whole numbers or a whole number above 0"),
        ("target", "capture_layer_ids = [3, 3]", "capture_layer_ids = [3, 3]: at least one, each once, counted from 0"),
        ("target", "replicas = true", "[target]: replicas = True: must be a whole number above 0"),
        ("target", 'replicas = "2"', "[target]: replicas = '2': must be a whole number above 0"),
        ("store", 'codec = "lossles"', "did you mean 'lossless'?"),
        ("train", "lr = -1", "[train]: lr = -1: must be a number above 0"),
        ("train", "lr = nan", "[train]: lr = nan: must be a number above 0"),
        ("train", "lr = inf", "[train]: lr = inf: must be a number above 0"),
        ("train", "seed = -1", "[train]: seed = -1: must be a whole number at least 0"),
        ("store", 'url = "s3:/me:pw@bucket"', "[store]: url holds credentials or options"),
        ("store", 'url = "s3://me:p/w@bucket"', "[store]: url holds credentials or options"),
        ("store", "chunk_tokens = 10000000000000", "chunk_tokens = 10000000000000: must be a whole number above 0 and at most 65536"),
        ("drafter", "layers = 100000000", "layers = 100000000: must be a whole number above 0 and at most 256"),
        ("drafter", "intermediate_size = 1000000000000000000", "must be a whole number above 0 and at most 1000000"),
        ("regenerate", 'base_urls = "http://me:pw@h/v1?token=k"', "base_urls = 'http://...@h/v1?...': must be a list of texts"),
        ("corpus", 'roles = { a = "b" }', 'roles = {\'a\': \'b\'}: must be a table of "system", "user", "assistant" or "tool"'),
        ("store", 'url = "memory://x"', "memory is gone with the process that captures"),
        ("export", 'license = "a\\u0000b"', "holds the character of number 0"),
        ("train", "betas = [0.9]", "[train]: betas = [0.9]: must be a list of 2 numbers at least 0.0 and below 1.0"),
        ("train", "betas = [0.9, 1.5]", "must be a list of 2 numbers at least 0.0 and below 1.0"),
        ("train", "kl_weight = 0.5", "[train] kl_weight needs the target's last hidden state: set [store] store_last_hidden = true"),
        ("train", "tokens_per_batch = 100", "[train] tokens_per_batch = 100 is below [corpus] max_length = 8192"),
        ("train", "slots_per_batch = 8", "[train] slots_per_batch = 8 is below [drafter] block_size = 16"),
        ("train", 'gpus = "cpu"\nhead_precision = "fp8"', '[train] head_precision = "fp8" needs GPUs; with gpus = "cpu" use "bf16"'),
        ("train", 'gpus = "cpu"\nattention = "flex"', '[train] attention = "flex" needs GPUs; with gpus = "cpu" use "auto" or "sdpa"'),
        ("train", 'gpus = "cpu"\nattention = "triton"', '[train] attention = "triton" needs GPUs; with gpus = "cpu" use "auto" or "sdpa"'),
        ("corpus", "bucket_edges = [256, 128]", "[corpus]: bucket_edges = [256, 128]: must rise"),
        ("corpus", "bucket_edges = []", "must be a list of whole numbers above 0"),
        ("corpus", "max_length = 9000", "max_length = 9000 does not fit bucket_edges, which end at 8193"),
        ("corpus", "tokens_per_batch = 10", "tokens_per_batch = 10 is below max_length = 8192"),
        ("corpus", "heldout_fraction = 1.0", "heldout_fraction = 1.0: must be a number at least 0.0 and below 1.0"),
        ("drafter", "block_size = 1", "block_size = 1: must be a whole number at least 2 and at most 64"),
        ("drafter", "head_dim = 3", "head_dim = 3 is odd"),
        (
            "drafter",
            "num_attention_heads = 5\nnum_key_value_heads = 2",
            "num_attention_heads = 5 is no multiple of num_key_value_heads = 2",
        ),
        ("drafter", "sliding_layers = [0]", "sliding_layers is set but sliding_window is not"),
        ("drafter", "sliding_window = 8\nsliding_layers = [5]", "names a layer the drafter does not have (layers = 5)"),
        ("drafter", "target_layer_ids = [1, 1]", "target_layer_ids = [1, 1]: at least one, each once"),
        ("export", 'formats = ["zlb"]', 'formats = [\'zlb\']: must be a list of "zlab" or "speculators" (at least one)'),
    ],
)
def test_a_refused_setting_names_file_section_key_and_what_is_allowed(tmp_path: Path, section: str, line: str, expected: str) -> None:
    message = refusal(tmp_path, with_setting(section, line))
    assert expected in message
    assert message.count("run.toml: ") == 1, "one fault, one line"


def test_drafter_cannot_read_what_is_not_captured(tmp_path: Path) -> None:
    text = with_setting("target", "capture_layer_ids = [1, 2]") + "\n[drafter]\ntarget_layer_ids = [2, 3]"
    assert "[drafter] target_layer_ids names [3], which [target] capture_layer_ids = [1, 2] does not capture" in refusal(tmp_path, text)


INDEPENDENT = '[train]\nmode = "independent"\n'


def with_drafters(*entries: str, train: str = INDEPENDENT, target: str = "capture_layer_ids = [0, 1, 2]") -> str:
    """A minimal run file with entries in [[drafters]]."""
    return with_setting("target", target) + f"\n{train}" + "".join(f"\n[[drafters]]\n{entry}\n" for entry in entries)


def test_drafters_are_the_sections_with_what_their_entries_change(tmp_path: Path) -> None:
    text = with_drafters(
        'name = "a"', 'name = "b"\nlayers = 2\nlr = 1e-3\nbetas = [0.9, 0.99]\ngpus = [0, 1]', train=INDEPENDENT + "seed = 3"
    )
    config = load(tmp_path, text)
    a, b = config.each_drafter()
    assert (a.name, a.drafter, a.train, a.drafters) == ("a", config.drafter, config.train, [])
    assert (b.name, b.drafter.layers, b.drafter.block_size, b.train.lr, b.train.betas) == ("b", 2, 16, 1e-3, (0.9, 0.99))
    assert (b.train.seed, b.train.gpus, a.train.gpus) == (3, [0, 1], [5, 6, 7])
    assert config.for_drafter("b") == b and b.source == config.source
    with pytest.raises(ConfigError, match=r"run\.toml: no drafter is called 'c'; there are a, b"):
        config.for_drafter("c")
    with pytest.raises(ConfigError, match=r"no drafter is called 'a'; the run file has no \[\[drafters\]\]"):
        load(tmp_path, with_setting("target", "")).for_drafter("a")


def test_a_setting_of_the_sections_that_no_drafter_has_is_no_fault(tmp_path: Path) -> None:
    """[drafter] block_size alone would not fit [train] slots_per_batch; every drafter has a smaller one."""
    train = INDEPENDENT + "slots_per_batch = 8"
    assert load(tmp_path, with_drafters('name = "a"\nblock_size = 8', train=train)).for_drafter("a").drafter.block_size == 8
    assert "[[drafters]] b: [train] slots_per_batch = 8 is below" in refusal(tmp_path, with_drafters('name = "b"', train=train))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (with_drafters('name = "a"', train=""), '[[drafters]] are given; set [train] mode = "independent"'),
        (with_drafters(), 'mode = "independent" trains the drafters of [[drafters]], and there are none'),
        (with_drafters("layers = 2"), "[[drafters]]: entry 1 has no name"),
        (with_drafters('name = "a/b"'), "[[drafters]]: name = 'a/b': must be letters, digits"),
        (with_drafters('name = "a"', 'name = "A"'), "[[drafters]]: two entries are called 'A'"),
        (with_drafters('name = "a"\nlayrs = 2'), "[[drafters]] a: unknown key 'layrs'; did you mean 'layers'?"),
        (with_drafters('name = "a"\ncodec = "int8"'), "[[drafters]] a: unknown key 'codec'; "),
        (with_drafters('name = "a"\nlr = -1'), "[[drafters]] a: lr = -1: must be a number above 0"),
        (with_drafters('name = "a"\nhead_dim = 3'), "[[drafters]] a: head_dim = 3 is odd"),
        (with_drafters('name = "a"\nnodes = ["x"]'), "[[drafters]] a: nodes is for the whole run; write it into [train]"),
        (with_drafters('name = "a"\ntarget_layer_ids = [1, 3]'), "[[drafters]] a: [drafter] target_layer_ids names [3], which [target] "),
        (with_drafters('name = "a"\ngpus = [1, 2]', 'name = "b"\ngpus = [2]'), "[[drafters]]: GPU 2 is named by a and by b; "),
        (with_drafters('name = "a"\ngpus = "all"', 'name = "b"'), '[[drafters]] a: gpus = "all" would take those of the others'),
        (with_drafters('name = "a"\ngpus = [5, 6, 7]', 'name = "b"'), "[train] gpus = [5, 6, 7] is named by an entry, so b has none"),
        (with_drafters('name = "a"\ngpus = "cpu"\nattention = "flex"'), '[[drafters]] a: [train] attention = "flex" needs GPUs; '),
        (with_drafters('name = "a"', train=INDEPENDENT + 'nodes = ["x"]'), '[train] nodes is for mode = "ddp"'),
        (with_setting("drafters", 'name = "a"'), "drafters = {'name': 'a'}: must be a list of tables"),
    ],
)
def test_a_refused_drafter_is_named(tmp_path: Path, text: str, expected: str) -> None:
    message = refusal(tmp_path, text)
    assert expected in message and message.count("run.toml: ") == 1


def test_no_setting_is_in_both_sections_that_an_entry_overrides() -> None:
    assert not set(DrafterConfig.model_fields) & set(TrainConfig.model_fields)
    assert "name" not in known_settings() and set(TrainConfig.model_fields) >= OF_THE_WHOLE_RUN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[hosts]\nnode = 3", "node = 3: must be a section [hosts.node]"),
        ("[hosts.node]\ntrain_gpu = [0]", "[hosts.node]: unknown key 'train_gpu'; did you mean 'train_gpus'?"),
        ('[hosts.node]\ntrain_gpus = "x"', '[hosts.node]: train_gpus = \'x\': must be a list of whole numbers, "all" or "cpu"'),
        ("[hosts.node]\ntrain_gpus = [0, 0]", "[hosts.node]: gpus = [0, 0]: every GPU once, counted from 0"),
        ('[train]\nnodes = ["a", "A"]', "[train] nodes = ['a', 'A']: every host once"),
        ('[train]\nnodes = ["a", "a.b"]', "[train] nodes = ['a', 'a.b']: every host once"),
        ('[train]\nnodes = ["a", "b/c"]', "[train] nodes: 'b/c' is no host name; write what `hostname` prints there"),
        ('[train]\nnodes = [""]', "[train] nodes: '' is no host name; write what `hostname` prints there"),
        ('[train]\nnodes = ["a"]\ngpus = "all"', "does not say how many ranks a has; list its GPUs as train_gpus in [hosts.a]"),
        ('[train]\nnodes = ["a", "b"]\n[hosts.a]\ntrain_gpus = "cpu"', "some train on GPUs and some on the CPU"),
    ],
)
def test_a_refused_host_is_named(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, with_setting("target", "") + f"\n{text}")


def test_settings_that_need_gpus_are_for_hosts_that_have_them(tmp_path: Path) -> None:
    train = with_setting("train", 'gpus = "cpu"\nhead_precision = "fp8"')
    assert load(tmp_path, f"{train}\n[hosts.a]\ntrain_gpus = [0]").train.head_precision == "fp8"
    assert '"fp8" needs GPUs' in refusal(tmp_path, f"{train}\n[hosts.a]\ntarget_gpus = [0]")
    assert load(tmp_path, with_setting("train", 'gpus = "cpu"\nattention = "eager"')).train.why_not(None) is None


@pytest.mark.parametrize(
    ("name", "value", "capability", "reason"),
    [
        ("head_precision", "fp8", (8, 9), None),
        ("head_precision", "fp8", (8, 6), 'needs a GPU with fp8 matrix units (compute capability 8.9 or newer, not 8.6); use "bf16"'),
        ("attention", "triton", (7, 5), 'needs a GPU with bf16 matrix units (compute capability 8.0 or newer, not 7.5); use "auto"'),
        ("attention", "flex", (7, 5), None),
        ("attention", "sdpa", (6, 1), None),
    ],
)
def test_what_a_setting_needs_of_a_gpu(name: str, value: str, capability: tuple[int, int], reason: str | None) -> None:
    assert TrainConfig(**{name: value}).why_not(capability) == (None if reason is None else f'{name} = "{value}" {reason}')


def test_ranks_of_nodes_are_counted_on_each(tmp_path: Path) -> None:
    text = '\n[train]\nnodes = ["{here}", "b", "c.example.org"]\n[hosts."{here}"]\ntrain_gpus = [0]\n[hosts.c]\ntrain_gpus = [0, 1]\n'
    config = load(tmp_path, with_setting("target", "") + text.format(here=socket.gethostname()))
    assert config.train.gpus == [0] and config.ranks_of_nodes() == [1, 3, 2]


def test_missing_parts_are_named(tmp_path: Path) -> None:
    assert "section [target] is missing" in refusal(tmp_path, '[corpus]\nfiles = ["a"]')
    assert "[target]: 'model' is missing" in refusal(tmp_path, '[target]\n[corpus]\nfiles = ["a"]')
    assert "target = 3: must be a section [target]" in refusal(tmp_path, 'target = 3\n[corpus]\nfiles = ["a"]')


def test_several_faults_come_at_once_but_not_more_than_three(tmp_path: Path) -> None:
    message = refusal(tmp_path, with_setting("train", "lr = 0\nepochs = 0\nclip = 0\nwarmup_ratio = 2"))
    assert message.count("run.toml: ") == 3


def test_files_that_are_no_run_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run file; `dflash-offline init > run.toml`"):
        RunConfig.load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        RunConfig.load(tmp_path)
    assert "not valid TOML" in refusal(tmp_path, "a = [")
    (tmp_path / "latin.toml").write_bytes(b'root = "\xe9"')
    with pytest.raises(ConfigError, match="not valid TOML"):
        RunConfig.load(tmp_path / "latin.toml")


def test_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(with_setting("target", ""), encoding="utf-8-sig")
    assert RunConfig.load(path).target.model == "target"


def test_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    assert "root = 'taken' is a file" in refusal(tmp_path, 'root = "taken"\n' + with_setting("target", ""))


def test_files_expands_folders_and_globs(tmp_path: Path) -> None:
    folder = tmp_path / "run [1]"  # brackets in the run file's own folder are no glob
    for name in ("a.jsonl", "b.jsonl", "sub/c.jsonl", ".hidden/d.jsonl", ".e.jsonl", "note.txt"):
        (folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "data" / name).touch()
    config = load(folder, with_setting("target", ""))

    def names(*patterns: str) -> list[str]:
        return [str(path.relative_to(folder / "data")) for path in config.files(list(patterns), where="[corpus] files")]

    assert names("data/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("data/**/*.jsonl") == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert names("data") == ["a.jsonl", "b.jsonl", "note.txt", "sub/c.jsonl"]
    assert names("data/b.jsonl", "./data/*.jsonl") == ["b.jsonl", "a.jsonl", "b.jsonl"]
    with pytest.raises(ConfigError, match=r"run\.toml: \[corpus\] files: 'data/\*\.parquet' matches no file"):
        names("data/*.parquet")


def test_paths_are_relative_to_the_run_file_not_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(tmp_path, with_setting("target", ""))
    monkeypatch.chdir("/")
    assert config.path("x/y") == tmp_path / "x" / "y"
    assert config.path("/x") == Path("/x")
    home = Path(pwd.getpwuid(0).pw_dir)
    assert config.path("~root/x") == home / "x"
    with pytest.raises(ConfigError, match="there is no such user"):
        config.path("~nobody-of-this-name/x")


def test_settings_cannot_be_changed_after_loading(tmp_path: Path) -> None:
    config = load(tmp_path, with_setting("target", ""))
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(("block_size", "gamma"), [(4, 2.0), (8, 4.0), (9, 4.5), (10, 5.0), (13, 6.0), (16, 7.0), (19, 8.0)])
def test_gamma_follows_the_block_size(block_size: int, gamma: float) -> None:
    config = RunConfig.model_validate({**MINIMAL, "drafter": {"block_size": block_size}, "train": {"slots_per_batch": 4096}})
    assert config.gamma == pytest.approx(gamma)


def test_gamma_given_wins() -> None:
    assert RunConfig.model_validate({**MINIMAL, "train": {"gamma": 3.5}}).gamma == 3.5


def test_allowed_in_words() -> None:
    known = TrainConfig.model_fields
    assert fields.allowed(known["gpus"]) == 'a list of whole numbers, "all" or "cpu"'
    assert fields.allowed(known["warmup_ratio"]) == "a number at least 0.0 and below 1.0"
    assert fields.allowed(known["gamma"]) == "a number above 0"
    assert fields.allowed(known["loss"]) == '"ce" or "dpace"'
