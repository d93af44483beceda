"""``python -m dflash_offline.cli``."""

from dflash_offline.cli.group import main

if __name__ == "__main__":
    main(prog_name="dflash-offline")
