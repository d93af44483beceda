"""The run file: ``run.toml`` -> ``RunConfig``.

Every field carries its documentation, so that ``dflash-offline init`` and the reference page are made from this
module. Unknown keys are refused with the nearest known one; paths are relative to the run file; nothing is read
from the environment. Which fields make up which stage's content key is said in ``keys.py``, not here.
"""

import glob
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dflash_offline import fields
from dflash_offline.errors import ConfigError

EMBEDDED = Path(__file__).with_name("demo_run.toml")
DEMO_MODEL = "demo:smollm2"

Gpus = list[int] | Literal["all", "cpu"]
PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    # strict: TOML has types, so "8" is no number and true is no 1
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False)


def _check_gpus(gpus: Gpus | None) -> Gpus | None:
    if isinstance(gpus, list):
        if not gpus:
            raise ValueError('gpus is an empty list; name GPUs, or "all", or "cpu"')
        if len(set(gpus)) != len(gpus) or min(gpus) < 0:
            raise ValueError(f"gpus = {gpus}: every GPU once, counted from 0")
    return gpus


class TargetConfig(Section):
    """The target model: the language model that the drafter will speed up."""

    model: str = Field(description='Model folder (relative to this file) or hub name; "demo:smollm2" is the embedded demo model.')
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Precision the target computes in. On a CPU float32 is much faster."
    )
    gpus: Gpus = Field(
        [0, 1, 2, 3, 4],
        description='GPUs that capture, one replica each; "all", or "cpu". They index CUDA_VISIBLE_DEVICES where that is set.',
    )
    replicas: PositiveInt = Field(1, description='Number of replicas when gpus = "cpu".')
    capture_layer_ids: list[int] | PositiveInt = Field(
        5, description="Layers whose output is stored (0-based; id i is HF hidden_states[i+1]), or how many to spread over the depth."
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field("sdpa", description="Attention implementation of the target.")
    compile: bool = Field(True, description="Compile the target's layers one by one. Has an effect on GPUs only.")
    trust_remote_code: bool = Field(False, description="Run modelling code that comes with the model folder.")

    _gpus = field_validator("gpus")(_check_gpus)

    @field_validator("capture_layer_ids")
    @classmethod
    def _layer_ids(cls, ids: list[int] | int) -> list[int] | int:
        if isinstance(ids, list) and (not ids or len(set(ids)) != len(ids) or min(ids) < 0):
            raise ValueError(f"capture_layer_ids = {ids}: at least one, each once, counted from 0")
        return ids


class RegenerateConfig(Section):
    """Answers written anew by the target, before the corpus is prepared. Without prompts nothing is regenerated."""

    prompts: list[str] = Field(
        [], description="Prompt files, folders or globs, in any format that [corpus] reads; user turns are asked, answers in them ignored."
    )
    backend: Literal["transformers", "server"] = Field(
        "transformers", description="Who answers: the target loaded here, or servers with the OpenAI interface (vLLM, SGLang)."
    )
    base_urls: list[str] = Field([], description='Servers, for example ["http://127.0.0.1:8000/v1"]; requests are spread over them.')
    model: str | None = Field(None, description="The model's name at the servers; the only one they serve when left out.")
    api_key_env: str | None = Field(None, description="Name of the environment variable that holds the servers' key.")
    concurrency: PositiveInt = Field(64, description="Requests in flight at each server.")
    retries: Annotated[int, Field(ge=0)] = Field(8, description="Further tries of a request before its row is given up.")
    retry_wait_s: Annotated[float, Field(gt=0)] = Field(
        0.5, description="Wait before the first of them; doubles each time up to 30 s, unless the server names a time."
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(600.0, description="Longest wait for one answer.")
    temperature: Annotated[float, Field(ge=0)] = Field(0.0, description="0 takes the most likely token each time.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Share of the probability that is drawn from.")
    max_new_tokens: PositiveInt = Field(2048, description="Most tokens of one answer. An answer cut here ends its conversation.")
    max_turns: PositiveInt = Field(8, description="Most user turns of a conversation that are asked.")
    max_prompts: PositiveInt | None = Field(None, description="Only the first so many rows of the prompt files; all when left out.")
    seed: int = Field(0, description="Seed of the drawn tokens.")
    gpus: Gpus | None = Field(None, description="GPUs of the transformers back end, one process each; those of [target] when left out.")
    replicas: PositiveInt = Field(1, description='Number of processes of the transformers back end when gpus = "cpu".')
    batch: PositiveInt = Field(512, description="Most conversations that one process answers at once; fewer where memory is short.")
    part_rows: PositiveInt = Field(1000, description="Most prompts in one part, the unit that is committed.")

    _gpus = field_validator("gpus")(_check_gpus)

    @field_validator("base_urls")
    @classmethod
    def _urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not re.fullmatch(r"https?://(\[[0-9a-fA-F:]+\]|[^\s/@?#:\[\]]+)(:\d+)?(/[^\s@?#]*)?", url):
                shown = re.sub(r"//[^/]*@", "//...@", url)
                raise ValueError(
                    f"base_urls: {shown!r} is no plain http(s)://host:port/path; a key goes into the variable that api_key_env names"
                )
        return urls

    @field_validator("api_key_env")
    @classmethod
    def _variable(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError("api_key_env is no name of an environment variable; never write the key itself into a run file")
        return name

    @model_validator(mode="after")
    def _backends(self) -> "RegenerateConfig":
        if self.backend == "server" and not self.base_urls:
            raise ValueError('backend = "server" needs base_urls, for example ["http://127.0.0.1:8000/v1"]')
        server_only = [name for name in ("base_urls", "model", "api_key_env") if getattr(self, name)]
        if self.backend == "transformers" and server_only:
            raise ValueError(f'{server_only[0]} has no effect with backend = "transformers"; set backend = "server"')
        return self


class CorpusConfig(Section):
    """The conversations: files, template, loss mask, length buckets, held-out split."""

    files: list[str] = Field(
        [],
        description="Conversation files, folders or globs: JSONL, JSON, Parquet, Arrow; gzip, bz2, xz, zstd. Left out with [regenerate].",
    )
    bucket_edges: list[PositiveInt] | Literal["auto"] = Field(
        [770, 1216, 1728, 2432, 3296, 8193],
        min_length=1,
        description='Length buckets in tokens: everything below the first edge, then [edge, next edge). "auto" takes them from the corpus.',
    )
    num_buckets: PositiveInt = Field(6, description='Most length buckets that bucket_edges = "auto" makes.')
    max_length: PositiveInt = Field(8192, description="Longest conversation kept whole, in tokens; must be below the last bucket edge.")
    too_long: Literal["cut", "cut_turn", "drop"] = Field(
        "cut", description="A longer one is cut at max_length, cut at its last whole turn, or dropped."
    )
    tokens_per_batch: PositiveInt = Field(16384, description="Token budget of one capture batch, padding included.")
    heldout_fraction: Fraction = Field(
        0.02, description="Share of the conversations kept for evaluation, chosen by a stable hash of their content."
    )
    chat_template: str | None = Field(None, description="File with a Jinja chat template in place of the tokenizer's own.")
    chat_template_kwargs: dict[str, Any] = Field({}, description="Passed to the chat template, for example { enable_thinking = false }.")
    supervise: Literal["all", "last"] = Field("all", description="Assistant turns that are trained on: all of them, or the last one only.")
    supervise_thinking: bool = Field(True, description="Whether thinking text inside an answer is trained on.")
    strict: bool = Field(False, description="Fail on the first row that cannot be used, instead of counting it.")
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = Field(
        {}, description='Role names of your own data, for example { student = "user", teacher = "assistant" }.'
    )
    drop_answers: list[str] = Field(
        [], description='Regular expressions; a conversation is left out when one matches the start of an answer, for example ["ERROR"].'
    )
    workers: PositiveInt | None = Field(None, description="Processes that tokenise; one for each core when left out.")

    @field_validator("drop_answers")
    @classmethod
    def _patterns(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"drop_answers: {pattern!r} is no regular expression ({error})") from None
        return patterns

    @model_validator(mode="after")
    def _edges(self) -> "CorpusConfig":
        edges = self.bucket_edges
        if isinstance(edges, list):
            if edges != sorted(set(edges)):
                raise ValueError(f"bucket_edges = {edges}: must rise")
            if self.max_length >= edges[-1]:
                raise ValueError(f"max_length = {self.max_length} does not fit bucket_edges, which end at {edges[-1]}; raise the last edge")
        if self.tokens_per_batch < self.max_length:
            raise ValueError(
                f"tokens_per_batch = {self.tokens_per_batch} is below max_length = {self.max_length}; a batch holds the longest row"
            )
        return self


class StoreConfig(Section):
    """The hidden-state store."""

    codec: Literal["bf16", "lossless", "int8", "int6", "int4"] = Field(
        "lossless",
        description="How hidden states are stored: bf16 as it is, lossless (about 0.68 of that), int8 (0.51), int6 (0.40), int4 (0.29).",
    )
    zstd: bool = Field(False, description="Compress int8/int6/int4 codes with zstd as well: smaller, slower to read.")
    part_bytes: PositiveInt = Field(1_000_000_000, description="Encoded hidden-state bytes in one part, the unit that is committed.")
    shard_bytes: PositiveInt = Field(128_000_000, description="Bytes of one Zarr shard (one file).")
    chunk_tokens: PositiveInt = Field(64, description="Tokens in one Zarr chunk, the unit that is read.")
    store_last_hidden: bool = Field(False, description="Also store the last layer's output before the final norm, for distillation losses.")
    verify: Literal["deep", "sizes", "off"] = Field(
        "deep", description="What training checks before it first reads a part: checksums, sizes only, or nothing."
    )


class DrafterConfig(Section):
    """The drafter's shape. Sizes left out follow the target."""

    layers: PositiveInt = Field(5, description="Number of decoder layers.")
    block_size: Annotated[int, Field(ge=2, le=64)] = Field(
        16, description="Slots of a block: one known token and block_size - 1 drafted ones."
    )
    target_layer_ids: list[int] | None = Field(
        None, description="Captured layers the drafter reads, in this order; all captured ones when left out."
    )
    mask_token_id: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Token id of a masked slot. Left out: the tokenizer's mask token, else the first embedding row that no token uses.",
    )
    intermediate_size: PositiveInt | None = Field(None, description="Width of the MLP.")
    num_attention_heads: PositiveInt | None = Field(None, description="Query heads.")
    num_key_value_heads: PositiveInt | None = Field(None, description="Key and value heads.")
    head_dim: PositiveInt | None = Field(None, description="Width of one head; even.")
    sliding_window: PositiveInt | None = Field(None, description="Window in tokens of the sliding layers; none when left out.")
    sliding_layers: list[int] | None = Field(
        None, description="Which drafter layers slide; all when sliding_window is set and this is left out."
    )

    @model_validator(mode="after")
    def _sizes(self) -> "DrafterConfig":
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary embedding needs an even one")
        if self.num_attention_heads and self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} is no multiple of num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.sliding_layers is not None:
            if self.sliding_window is None:
                raise ValueError("sliding_layers is set but sliding_window is not")
            if any(layer not in range(self.layers) for layer in self.sliding_layers):
                raise ValueError(f"sliding_layers = {self.sliding_layers} names a layer the drafter does not have (layers = {self.layers})")
        if self.target_layer_ids is not None and (
            not self.target_layer_ids or len(set(self.target_layer_ids)) != len(self.target_layer_ids)
        ):
            raise ValueError(f"target_layer_ids = {self.target_layer_ids}: at least one, each once")
        return self


class TrainConfig(Section):
    """Drafter training."""

    gpus: Gpus = Field(
        [5, 6, 7], description='GPUs that train, one rank each; "all", or "cpu". They index CUDA_VISIBLE_DEVICES where that is set.'
    )
    ranks: PositiveInt = Field(1, description='Number of ranks when gpus = "cpu".')
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Precision of forward and backward passes; master weights are float32 always."
    )
    attention: Literal["auto", "flex", "triton", "sdpa", "eager"] = Field(
        "auto",
        description="Attention path. auto: compiled block-sparse kernels on a GPU (never anything slower in silence), sdpa on a CPU.",
    )
    head_precision: Literal["bf16", "fp8"] = Field(
        "bf16", description="Precision of the frozen head's products; fp8 needs a GPU that has it."
    )
    epochs: Annotated[float, Field(gt=0)] = Field(6.0, description="Passes over the corpus.")
    max_steps: PositiveInt | None = Field(None, description="Stop after this many optimiser steps even if epochs are left.")
    tokens_per_batch: PositiveInt = Field(8192, description="Context tokens in one micro-batch, padding included; at least max_length.")
    micro_batches_per_step: PositiveInt = Field(3, description="Micro-batches in one optimiser step, over all ranks.")
    anchors: PositiveInt = Field(512, description="Most anchors (blocks) drawn from one conversation each epoch.")
    slots_per_batch: PositiveInt = Field(16384, description="Most block slots (anchors x block_size) in one micro-batch.")
    lr: Annotated[float, Field(gt=0)] = Field(6e-4, description="Peak learning rate of AdamW.")
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = Field((0.9, 0.95), description="AdamW betas.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW weight decay.")
    schedule: Literal["cosine", "wsd"] = Field(
        "cosine", description="Learning rate: warm-up then cosine to 10 %, or warm-up, constant, last fifth linear to 10 %."
    )
    warmup_ratio: Fraction = Field(0.04, description="Share of the steps that warms up.")
    clip: Annotated[float, Field(gt=0)] = Field(1.0, description="Largest gradient norm.")
    loss: Literal["ce", "dpace"] = Field("ce", description="Slot weights: exponential decay (ce), or D-PACE (arXiv 2605.18810).")
    gamma: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Decay of the slot weights; 7, 5, 4 for block sizes 16, 10, 8 when left out."
    )
    dpace_alpha: Annotated[float, Field(gt=0, lt=1)] = Field(0.5, description="Smoothing of D-PACE.")
    kl_weight: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Share of KL to the target's distribution in the loss; needs [store] store_last_hidden."
    )
    noise: Annotated[float, Field(ge=0)] = Field(0.0, description="Uniform noise on context features, in units of their RMS.")
    noise_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="How the noise goes to zero over training.")
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Decay of an average of the weights, used for evaluation and export."
    )
    seed: int = Field(0, description="Seed of initial weights, epoch order, anchors and noise.")
    checkpoint_every: PositiveInt = Field(500, description="Steps between checkpoints.")
    checkpoint_minutes: Annotated[float, Field(gt=0)] = Field(10.0, description="Minutes between checkpoints at the most.")
    keep_checkpoints: PositiveInt = Field(2, description="Checkpoints kept; older ones are deleted.")
    evaluate_every: PositiveInt = Field(500, description="Steps between evaluations on the held-out conversations.")
    heldout_rows: PositiveInt = Field(64, description="Most held-out conversations used in one of those evaluations.")
    log_every: PositiveInt = Field(10, description="Steps between status lines.")
    min_tokens_per_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Stop when training is slower than this after warm-up; 0 never stops."
    )

    _gpus = field_validator("gpus")(_check_gpus)


class EvaluateConfig(Section):
    """The real draft-and-verify loop after training."""

    prompts: list[str] = Field(
        [], description="Prompt files (JSONL with messages); each file is one data set. None: evaluation on held-out rows only."
    )
    max_prompts: PositiveInt = Field(80, description="Most prompts taken from one file.")
    max_new_tokens: PositiveInt = Field(256, description="Most tokens generated for one turn.")
    batch: PositiveInt = Field(8, description="Prompts decoded at once; 1 for the speed that a single user sees.")
    heldout_rows: PositiveInt = Field(64, description="Most held-out conversations used for tau_replay.")
    heldout_loop_rows: Annotated[int, Field(ge=0)] = Field(
        4,
        description="Held-out answers that the real loop writes too, so that its acceptance length stands beside tau_replay; 0 for none.",
    )
    baseline: bool = Field(True, description="Also time the target alone and check that the output is its own greedy output.")
    gpus: Gpus | None = Field(None, description="GPU of the evaluation (the first one is used); that of [train] when left out.")
    dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="Precision of target and drafter; that of [target] when left out."
    )

    _gpus = field_validator("gpus")(_check_gpus)


class ExportConfig(Section):
    """What the trained drafter is written as."""

    formats: list[Literal["zlab", "speculators"]] = Field(["zlab"], min_length=1, description="zlab: SGLang and vLLM; speculators: vLLM.")
    license: str = Field("other", description="Licence named in the model card.")
    target_name: str | None = Field(
        None, description="Name of the target in the model card and serve commands; [target] model when left out."
    )


class RunConfig(Section):
    """One run file. ``source`` and ``root`` are absolute; ``path()`` resolves any other path in it."""

    root: str = Field("dflash-run", description="Folder that everything is written to, relative to this file.")
    target: TargetConfig
    regenerate: RegenerateConfig = RegenerateConfig()
    corpus: CorpusConfig
    store: StoreConfig = StoreConfig()
    drafter: DrafterConfig = DrafterConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()

    _source: Path = Path("run.toml")

    @property
    def source(self) -> Path:
        """The run file itself, absolute."""
        return self._source

    @property
    def root_dir(self) -> Path:
        """Absolute folder of the run. The embedded run file's is in the current folder, not in the package."""
        base = Path.cwd() if self._source == EMBEDDED else self._source.parent
        return (base / self._expand(self.root)).resolve()

    @property
    def regenerates(self) -> bool:
        """Whether the corpus is made of answers that the target writes anew."""
        return bool(self.regenerate.prompts)

    @property
    def gamma(self) -> float:
        """Decay of the slot weights: as given, else 4, 5, 7 for block sizes 8, 10, 16 (arXiv 2602.06036), else on lines through these."""
        if self.train.gamma is not None:
            return self.train.gamma
        size = self.drafter.block_size
        return size / 2.0 if size <= 10 else 5.0 + (size - 10) / 3.0

    def path(self, name: str) -> Path:
        """A path as written in the run file -> absolute."""
        return (self._source.parent / self._expand(name)).absolute()

    def _expand(self, name: str) -> Path:
        try:
            return Path(name).expanduser()
        except RuntimeError:
            raise ConfigError(f"{self._source.name}: {name!r}: there is no such user; write ./{name} for a folder of that name") from None

    def files(self, patterns: list[str], *, where: str) -> list[Path]:
        """Expand files, folders and globs to existing files, sorted inside each pattern.

        Hidden files and folders (names that start with a dot) inside a folder are left out.

        Raises:
            ConfigError: a pattern matches nothing.
        """
        found: list[Path] = []
        for pattern in patterns:
            path = self.path(pattern)
            if path.is_dir():
                inside = (entry for entry in path.rglob("*") if not any(part.startswith(".") for part in entry.relative_to(path).parts))
                matched = sorted(entry for entry in inside if entry.is_file())
            elif path.exists():
                matched = [path]
            else:  # root_dir, not a joined pattern: the run file's own folder may have brackets in its name
                names = glob.iglob(str(self._expand(pattern)), root_dir=self._source.parent, recursive=True)  # noqa: PTH207
                matched = sorted(entry for entry in map(self.path, names) if entry.is_file())
            if not matched:
                raise ConfigError(f"{self._source.name}: {where}: {pattern!r} matches no file (looked for {path})")
            found.extend(matched)
        return found

    @model_validator(mode="after")
    def _clashes(self) -> "RunConfig":
        if "regenerate" in self.model_fields_set and not self.regenerates:
            raise ValueError("[regenerate] prompts names no file; name prompt files, or remove the section")
        if self.regenerates and self.corpus.files:
            raise ValueError(
                "[corpus] files and [regenerate] prompts are both given; remove files to train on the regenerated answers, "
                "or [regenerate] to train on the answers in files"
            )
        if not self.regenerates and not self.corpus.files:
            raise ValueError("[corpus] files names no file; name conversation files, or prompts in [regenerate]")
        if self.train.tokens_per_batch < self.corpus.max_length:
            raise ValueError(
                f"[train] tokens_per_batch = {self.train.tokens_per_batch} is below [corpus] max_length = {self.corpus.max_length}; "
                "a micro-batch must hold the longest conversation"
            )
        if self.train.slots_per_batch < self.drafter.block_size:
            raise ValueError(
                f"[train] slots_per_batch = {self.train.slots_per_batch} is below [drafter] block_size = {self.drafter.block_size}"
            )
        if self.train.kl_weight > 0 and not self.store.store_last_hidden:
            raise ValueError(
                "[train] kl_weight needs the target's last hidden state: set [store] store_last_hidden = true (and capture again)"
            )
        captured, wanted = self.target.capture_layer_ids, self.drafter.target_layer_ids
        if isinstance(captured, list) and wanted is not None and (missing := [i for i in wanted if i not in captured]):
            raise ValueError(f"[drafter] target_layer_ids names {missing}, which [target] capture_layer_ids = {captured} does not capture")
        return self

    @classmethod
    def load(cls, path: Path | str) -> "RunConfig":
        """Read and validate a run file.

        Raises:
            ConfigError: one line that names file, section, key and what is allowed.
        """
        path = Path(path).absolute()
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such run file; `dflash-offline init > run.toml` writes a commented one") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        try:
            tables = tomllib.loads(content.decode("utf-8-sig"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path.name}: not valid TOML: {error}") from None
        try:
            config = cls.model_validate(tables)
        except ValidationError as error:
            raise ConfigError("; ".join(f"{path.name}: {line}" for line in fields.explain(cls, tables, error)[:3])) from None
        config._source = path
        if config.root_dir.exists() and not config.root_dir.is_dir():
            raise ConfigError(f"{path.name}: root = {config.root!r} is a file ({config.root_dir}); name a folder")
        return config
