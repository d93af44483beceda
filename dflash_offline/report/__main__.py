"""``python -m dflash_offline.report --config FILE --key KEY``."""

from dflash_offline.report.stage import main

if __name__ == "__main__":
    main()
