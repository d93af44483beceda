"""``python -m dflash_offline.evaluate --config FILE --key KEY``."""

from dflash_offline.evaluate.stage import main

if __name__ == "__main__":
    main()
