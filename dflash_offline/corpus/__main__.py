"""The stage: ``python -m dflash_offline.corpus --config run.toml [--key KEY] [--strict]``."""

import argparse
from pathlib import Path

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.corpus.preparation import prepare
from dflash_offline.layout import Layout
from dflash_offline.plan import CODEC_SHARE, make_plan
from dflash_offline.progress import Progress
from dflash_offline.stage import run_stage


def prepare_corpus(config: RunConfig, arguments: argparse.Namespace, progress: Progress) -> None:
    """Prepare the corpus, then plan its capture."""
    layout = Layout(config.root_dir)
    if arguments.strict:  # in no key: it changes whether a corpus is made, not which
        config = config.model_copy(update={"corpus": config.corpus.model_copy(update={"strict": True})})
    corpus = prepare(config, layout.corpus(arguments.key), arguments.key, progress)
    from dflash_offline.drafter import check_sizes  # late for torch's sake

    check_sizes(config)
    capture_key = keys.capture_key(config)
    plan = make_plan(config, corpus, layout.store(capture_key), layout.plan(capture_key, arguments.key))
    progress.say(plan.summary())
    if plan.parts:
        for codec, path in captured_otherwise(config, layout).items():
            progress.say(
                f'note: hidden states of this target are stored with codec "{codec}" already, in {path}; '
                f'[store] codec = "{codec}" uses them'
            )
    progress.update(text="corpus and capture plan are complete", force=True)


def with_codec(config: RunConfig, codec: str) -> RunConfig:
    return config.model_copy(update={"store": config.store.model_copy(update={"codec": codec})})


def captured_otherwise(config: RunConfig, layout: Layout) -> dict[str, Path]:
    """Stores of other codecs with which the same hidden states were captured below this root: nobody should pay for them twice unasked."""
    from dflash_offline.store.schema import committed_parts  # late for torch's sake

    stores = {codec: layout.store(keys.capture_key(with_codec(config, codec))) for codec in CODEC_SHARE if codec != config.store.codec}
    return {codec: path for codec, path in stores.items() if committed_parts(path)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strict", action="store_true", help="fail on the first row that cannot be used, as [corpus] strict = true")


def main(argv: list[str] | None = None) -> None:
    run_stage("corpus", prepare_corpus, argv, key=keys.corpus_key, add_arguments=add_arguments)


if __name__ == "__main__":
    main()
