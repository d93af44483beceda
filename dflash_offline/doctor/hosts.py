"""Where the run file names hosts: whether this is one of them, and whether the place where their ranks meet is known here."""

import socket
from collections.abc import Iterator

from dflash_offline.config import RunConfig, same_host
from dflash_offline.doctor.check import Check


def hosts(config: RunConfig) -> Iterator[Check]:
    if not config.names_hosts:
        return
    here, nodes = socket.gethostname(), config.train.nodes
    known = any(same_host(name, here) for name in [*config.hosts, *nodes])
    named = "named in the run file" if known else "in neither [hosts] nor [train] nodes"
    advice = "" if known else "if it should be, write its name as `hostname` prints it; else it captures with [target] gpus"
    yield Check("this host", "ok" if known else "warn", f"{here}, {named}", advice)
    if len(nodes) > 1:
        address, port = config.train.master_address or nodes[0], config.train.master_port
        try:
            found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0]
            yield Check("[train] nodes", "ok", f"{len(nodes)} hosts meet at {address} ({found}), port {port}")
        except OSError as error:
            advice = "set [train] master_address to an address of the first node that all of them know"
            yield Check("[train] nodes", "fail", f"{address} is not known here ({error.strerror})", advice)
