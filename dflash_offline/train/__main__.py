"""``python -m dflash_offline.train``: see the package's docstring."""

from dflash_offline import keys
from dflash_offline.stage import run_stage
from dflash_offline.train import add_arguments, train


def main(argv: list[str] | None = None) -> None:
    """Run one rank."""
    run_stage("train", train, argv, key=keys.train_key, add_arguments=add_arguments)


if __name__ == "__main__":
    main()
