"""``python -m dflash_offline.export --config FILE --key KEY``."""

from dflash_offline.export.stage import main

if __name__ == "__main__":
    main()
