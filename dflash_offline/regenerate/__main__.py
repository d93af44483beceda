"""The stage: ``python -m dflash_offline.regenerate --config run.toml [--key KEY] [--replica I --replicas N]``."""

import argparse

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.progress import Progress
from dflash_offline.regenerate.run import regenerate
from dflash_offline.stage import run_stage


def regenerate_responses(config: RunConfig, arguments: argparse.Namespace, progress: Progress) -> None:
    """Answer the prompts of the run file."""
    regenerate(config, arguments.key, progress, replica=arguments.replica, replicas=arguments.replicas)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replica", type=int, default=0, help="number of this process, from 0")
    parser.add_argument("--replicas", type=int, default=1, help="processes in all")


def main(argv: list[str] | None = None) -> None:
    run_stage("regenerate", regenerate_responses, argv, key=keys.regenerate_key, add_arguments=add_arguments)


if __name__ == "__main__":
    main()
