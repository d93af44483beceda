"""``python -m dflash_offline.capture --config FILE [--key KEY] --replica I --replicas N``: one replica of the target."""

import argparse

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.leases import EXPIRES_S
from dflash_offline.progress import Progress
from dflash_offline.stage import run_stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replica", type=int, default=0, help="number of this replica, from 0")
    parser.add_argument("--replicas", type=int, default=1, help="how many run at the same time; for the estimate of the time left only")
    parser.add_argument("--host", help="name of this host in lease files, in place of its own")
    parser.add_argument(
        "--lease-expires", type=float, default=EXPIRES_S, metavar="SECONDS", help="silence after which a lease may be taken over"
    )


def body(config: RunConfig, arguments: argparse.Namespace, progress: Progress) -> None:
    from dflash_offline.capture.replica import Replica
    from dflash_offline.drafter import check_sizes

    check_sizes(config)  # here too: a corpus that was prepared for another drafter is not prepared again
    replica = Replica(
        config,
        capture_key=arguments.key,
        replica=arguments.replica,
        replicas=arguments.replicas,
        progress=progress,
        host=arguments.host,
        lease_expires_s=arguments.lease_expires,
    )
    replica.run()


if __name__ == "__main__":
    run_stage("capture", body, key=keys.capture_key, add_arguments=add_arguments)
