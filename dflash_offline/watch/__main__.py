"""``python -m dflash_offline.watch --root ROOT --command PID``."""

from dflash_offline.watch.display import main

if __name__ == "__main__":
    main()
