"""The whole run file: its sections, its paths, and the settings that only make sense together."""

import re
import socket
import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from dflash_offline import fields
from dflash_offline.config import drafters as entries
from dflash_offline.config.corpus import CorpusConfig
from dflash_offline.config.drafter import DrafterConfig
from dflash_offline.config.hosts import HostConfig, same_host
from dflash_offline.config.regenerate import RegenerateConfig
from dflash_offline.config.results import EvaluateConfig, ExportConfig
from dflash_offline.config.section import Gpus, Section
from dflash_offline.config.store import StoreConfig
from dflash_offline.config.target import TargetConfig
from dflash_offline.config.train import TrainConfig
from dflash_offline.errors import ConfigError

EMBEDDED = Path(__file__).parents[1] / "demo_run.toml"
DEMO_MODEL = "demo:smollm2"


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
    drafters: list[dict[str, Any]] = Field(
        [], description='With [train] mode = "independent": the drafters; a name each, and what it changes of [drafter] and [train].'
    )
    hosts: dict[str, HostConfig] = Field({}, description="Hosts that share this run file and its root: GPUs by host name.")

    _source: Path = Path("run.toml")
    _name: str = ""
    _as_written: "RunConfig | None" = None

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
    def name(self) -> str:
        """Name of the one drafter this is about; empty for a run file without [[drafters]], or for all of them."""
        return self._name

    @property
    def drafter_names(self) -> list[str]:
        """Names in [[drafters]], in the order of the run file; none without that section."""
        return [entry["name"] for entry in self.drafters]

    def where(self, section: str) -> str:
        """How messages name [drafter] or [train]: by the drafter where there are several."""
        return f"[[drafters]] {self._name}:" if self._name else f"[{section}]"

    def for_drafter(self, name: str) -> "RunConfig":
        """The run file as if this drafter were its only one.

        Raises:
            ConfigError: there is no such drafter.
        """
        if name == self._name:
            return self
        entry = next((entry for entry in self.drafters if entry["name"] == name), None)
        if entry is None:
            known = f"there are {', '.join(self.drafter_names)}" if self.drafters else "the run file has no [[drafters]]"
            raise ConfigError(f"{self._source.name}: no drafter is called {name!r}; {known}")
        return self._merged(entry)

    def each_drafter(self) -> list["RunConfig"]:
        """``for_drafter`` of each, in the order of the run file; the run file itself without [[drafters]]."""
        return [self._merged(entry) for entry in self.drafters] or [self]

    def _merged(self, entry: entries.Entry) -> "RunConfig":
        drafter, train = entries.merge(self.drafter, self.train, entry)
        made = self.model_copy(update={"drafter": drafter, "train": train, "drafters": []})
        made._name = entry["name"]
        return made

    @property
    def names_hosts(self) -> bool:
        """Whether several hosts run this file, so that each keeps logs and locks of its own."""
        return bool(self.hosts or self.train.nodes)

    def on_host(self, host: str) -> "RunConfig":
        """The run file as it holds on a host: with the GPUs that [hosts] gives it."""
        given = next((section for name, section in self.hosts.items() if same_host(name, host)), None)
        if given is None:
            return self
        changed = {
            name: getattr(self, name).model_copy(update={"gpus": gpus})
            for name, gpus in (("target", given.target_gpus), ("train", given.train_gpus), ("evaluate", given.evaluate_gpus))
            if gpus is not None
        }
        made = self.model_copy(update=changed)
        made._as_written = self
        return made

    def ranks_of_nodes(self) -> list[int]:
        """Training ranks on each of [train] nodes."""
        written = self._as_written or self
        sections = [written.on_host(node).train for node in self.train.nodes]
        return [train.ranks if train.gpus == "cpu" else len(train.gpus) for train in sections]

    @property
    def regenerates(self) -> bool:
        """Whether the corpus is made of answers that the target writes anew."""
        return bool(self.regenerate.prompts)

    @property
    def evaluation_gpus(self) -> Gpus:
        """GPUs of the evaluation, of which the first is used; those of training when left out."""
        return self.train.gpus if self.evaluate.gpus is None else self.evaluate.gpus

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
        """Files, folders, globs, standard input and Hugging Face data sets -> existing files (``inputs.expand``)."""
        from dflash_offline.inputs import expand

        return expand(self, patterns, where=where)

    def evaluation_prompts(self) -> list[Path]:
        """The files of [evaluate] prompts. Files only: each of them is a data set, called by its file's name."""
        from dflash_offline.inputs import expand

        return expand(self, self.evaluate.prompts, where="[evaluate] prompts", only_files=True)

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
        self._check_places()
        if not self.drafters:
            self._check_drafter()
        return self

    def _check_places(self) -> None:
        """Mode, [[drafters]] and nodes fit one another."""
        mode, nodes = self.train.mode, self.train.nodes
        if self.drafters and mode != "independent":
            raise ValueError('[[drafters]] are given; set [train] mode = "independent" to train them side by side, or remove them')
        if mode == "independent" and not self.drafters:
            raise ValueError('[train] mode = "independent" trains the drafters of [[drafters]], and there are none; name some')
        if mode == "independent" and nodes:
            raise ValueError(
                '[train] nodes is for mode = "ddp"; independent drafters need none: each host that runs the command takes some'
            )
        if any(same_host(one, other) for i, one in enumerate(nodes) for other in nodes[:i]):
            raise ValueError(f"[train] nodes = {nodes}: every host once")
        if wrong := [node for node in nodes if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", node)]:
            raise ValueError(f"[train] nodes: {wrong[0]!r} is no host name; write what `hostname` prints there")
        kinds = {node: self.on_host(node).train.gpus for node in nodes}
        for node, gpus in kinds.items():
            if gpus == "all":
                raise ValueError(
                    f'[train] gpus = "all" does not say how many ranks {node} has; list its GPUs as train_gpus in [hosts.{node}]'
                )
        if len({gpus == "cpu" for gpus in kinds.values()}) > 1:
            raise ValueError(f"[train] nodes = {nodes}: some train on GPUs and some on the CPU; ranks need one kind of device")
        entries.check_names(self.drafters)
        for entry in self.drafters:
            merged = self._merged(entry)
            try:
                merged._check_drafter()
            except ValueError as error:
                raise ValueError(f"{entries.where(entry)}: {error}") from None
        entries.check_gpus(self.drafters, self.train)

    def _check_drafter(self) -> None:
        """Settings of one drafter that only make sense together."""
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
        on_cpu = self.train.gpus == "cpu" and all(host.train_gpus in (None, "cpu") for host in self.hosts.values())
        if on_cpu and (reason := self.train.why_not(None)):
            raise ValueError(f"[train] {reason}")
        captured, wanted = self.target.capture_layer_ids, self.drafter.target_layer_ids
        if isinstance(captured, list) and wanted is not None and (missing := [i for i in wanted if i not in captured]):
            raise ValueError(f"[drafter] target_layer_ids names {missing}, which [target] capture_layer_ids = {captured} does not capture")

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
        if b"\\u0000" in content or b"\\U00000000" in content:
            raise ConfigError(f"{path.name}: holds the character of number 0 (\\u0000), which no file name or setting may hold")
        try:
            config = cls.model_validate(tables)
        except ValidationError as error:
            raise ConfigError("; ".join(f"{path.name}: {line}" for line in fields.explain(cls, tables, error)[:3])) from None
        config._source = path
        config = config.on_host(socket.gethostname())
        if config.root_dir.exists() and not config.root_dir.is_dir():
            raise ConfigError(f"{path.name}: root = {config.root!r} is a file ({config.root_dir}); name a folder")
        return config
