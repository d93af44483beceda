"""The content key of each stage: what is in it and what is not.

A key is part of the stage's output path, so a changed input is another output and an unchanged one is never made
again. GPUs, numbers of workers, log intervals and paths are in no key. A stage's key holds the key of the stage
before it, so a setting of a later stage never touches an earlier one.

==========  ==========================================================================================
stage       in its key
==========  ==========================================================================================
regenerate  content of the prompt files; target's config and weights; tokenizer, template; [corpus] roles;
            with the transformers back end [target] dtype; [regenerate] except ``NOT_IN_REGENERATE_KEY``
corpus      content of the conversation files, or the regenerate key; tokenizer, template and its options; [corpus] except
            tokens_per_batch, strict, workers
capture     target's config and weights; tokenizer, template; layer ids; [target] dtype; [store] codec,
            zstd, store_last_hidden. Not the corpus: rows are addressed by content inside the store
train       corpus, capture; [drafter] (target_layer_ids resolved: writing the default out changes nothing; the
            drafter of init_from by its content);
            [train] except the settings in ``NOT_IN_TRAIN_KEY``
export      train; [export]
evaluate    train; [evaluate] except gpus; content of the prompt files
report      export, evaluate; with [[drafters]] those of each, and its name
==========  ==========================================================================================

A setting that another one switches off (``dpace_alpha`` with loss "ce") counts as its default, so that writing it changes nothing.

With [[drafters]] the keys from train to evaluate are those of one drafter, ``RunConfig.for_drafter(name)``: the same as
of a run file that has its settings in [drafter] and [train]. Names and [hosts] are in no key but the report's.
"""

from typing import Any

from dflash_offline import identity
from dflash_offline.config import RunConfig, Section
from dflash_offline.errors import ConfigError

FORMAT = 1  # raised when a stage's output changes meaning, so that old outputs are not taken for new ones

NOT_IN_REGENERATE_KEY = {  # where and how fast, not what is asked; prompts go in by content
    "prompts",
    "base_urls",
    "api_key_env",
    "concurrency",
    "retries",
    "retry_wait_s",
    "timeout_s",
    "gpus",
    "replicas",
    "batch",
    "part_rows",
}
NOT_IN_CORPUS_KEY = {"files", "tokens_per_batch", "strict", "workers", "chat_template"}  # files and template go in by content
NOT_IN_TRAIN_KEY = {
    "mode",  # a drafter is the same whatever is trained beside it
    "nodes",
    "master_address",
    "master_port",
    "gpus",
    "ranks",
    "attention",
    "checkpoint_every",
    "checkpoint_minutes",
    "keep_checkpoints",
    "evaluate_every",
    "heldout_rows",
    "reader",
    "log_every",
    "min_tokens_per_s",
    "fsdp",
    "trackers",
    "tracker_project",
}


def _without_effect(config: RunConfig) -> set[tuple[str, str]]:
    """``(section, setting)`` of what another setting switches off: it goes into keys as its default, whatever it says.

    Not so in a store's identity: there every setting counts as written, so that what was captured before stays valid.
    """
    train = config.train
    off = {
        ("corpus", "num_buckets"): config.corpus.bucket_edges != "auto",
        ("train", "gamma"): train.loss != "ce",
        ("train", "dpace_alpha"): train.loss != "dpace",
        ("train", "noise_schedule"): train.noise == 0,
    }
    return {setting for setting, is_off in off.items() if is_off}


def _settings(config: RunConfig, section: str, *, exclude: set[str]) -> dict[str, Any]:
    """What a section says that can change a result."""
    table: Section = getattr(config, section)
    values = table.model_dump(mode="json", exclude=exclude)
    for other, setting in _without_effect(config):
        if other == section:
            values[setting] = type(table).model_fields[setting].default
    return values


def regenerate_key(config: RunConfig) -> str:
    """Key of the answers that the target writes anew."""
    section = config.regenerate
    prompts = identity.files_identity(config, config.files(section.prompts, where="[regenerate] prompts"))
    dtype = config.target.dtype if section.backend == "transformers" else None
    options = section.model_dump(mode="json", exclude=NOT_IN_REGENERATE_KEY)
    who = [identity.target_identity(config), identity.tokenizer_identity(config), dtype]
    return identity.short(["regenerate", FORMAT, prompts, who, config.corpus.roles, options])


def corpus_key(config: RunConfig) -> str:
    """Key of the tokenised corpus. Regenerated answers go in by their own key, so that it is known before they are there."""
    files: list[str] | dict[str, str]
    if config.regenerates:
        files = {"regenerated": regenerate_key(config)}
    else:
        files = identity.files_identity(config, config.files(config.corpus.files, where="[corpus] files"))
    options = _settings(config, "corpus", exclude=NOT_IN_CORPUS_KEY)
    return identity.short(["corpus", FORMAT, files, identity.tokenizer_identity(config), options])


def store_identity(config: RunConfig) -> dict[str, object]:
    """The fields that make two stores different; kept in the store and compared by name."""
    return {
        **{f"target_{name}": value for name, value in identity.target_identity(config).items()},
        **identity.tokenizer_identity(config),
        "layer_ids": identity.capture_layer_ids(config),
        "layer_convention": "id i = output of 0-based decoder layer i = hidden_states[i+1], before the final norm",
        "dtype": config.target.dtype,
        "codec": config.store.codec,
        "zstd": config.store.zstd and config.store.codec in ("int8", "int6", "int4"),  # others have no codes to compress
        "store_last_hidden": config.store.store_last_hidden,
    }


def capture_key(config: RunConfig) -> str:
    """Key of the hidden-state store."""
    return identity.short(["capture", FORMAT, store_identity(config)])


def train_key(config: RunConfig) -> str:
    """Key of the trained drafter.

    Raises:
        ConfigError: the run file has several, and ``config`` is not about one of them (``RunConfig.for_drafter``).
    """
    if config.drafters:
        names = ", ".join(config.drafter_names)
        raise ConfigError(f"{config.source.name}: it has several drafters; name one of {names} with --drafter")
    return identity.short(
        [
            "train",
            FORMAT,
            corpus_key(config),
            capture_key(config),
            identity.drafter_layer_ids(config),
            config.drafter.model_dump(mode="json", exclude={"target_layer_ids", "init_from"}),
            _settings(config, "train", exclude=NOT_IN_TRAIN_KEY),
            *identity.start_identity(config),
        ]
    )


def export_key(config: RunConfig) -> str:
    """Key of the exported folders."""
    return identity.short(["export", FORMAT, train_key(config), config.export.model_dump(mode="json")])


def evaluate_key(config: RunConfig) -> str:
    """Key of the evaluation."""
    prompts = identity.files_identity(config, config.evaluation_prompts())
    options = config.evaluate.model_dump(mode="json", exclude={"gpus", "prompts"})
    return identity.short(["evaluate", FORMAT, train_key(config), prompts, options])


def report_key(config: RunConfig) -> str:
    """Key of the report.

    Raises:
        ConfigError: two of [[drafters]] differ in nothing but their names, or where they train.
    """
    if not config.drafters:
        return identity.short(["report", FORMAT, export_key(config), evaluate_key(config)])
    named: dict[str, str] = {}
    for each in config.each_drafter():
        if (other := named.setdefault(train_key(each), each.name)) != each.name:
            raise ConfigError(f"{config.source.name}: [[drafters]] {other} and {each.name} are the same drafter; remove one of them")
    return identity.short(["report", FORMAT, [[each.name, export_key(each), evaluate_key(each)] for each in config.each_drafter()]])
