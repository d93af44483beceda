"""luigid, where the Luigi configuration of this folder asks for it."""

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from dflash_offline.config import RunConfig
from dflash_offline.doctor.check import Check

_PORT = 8082


def luigid(config: RunConfig) -> Iterator[Check]:
    from luigi.configuration import get_config

    settings = get_config()

    def setting(name: str, default: str) -> str:
        return str(settings.get("core", name, settings.get("core", name.replace("_", "-"), default)))

    host, port = setting("default_scheduler_host", "localhost"), int(setting("default_scheduler_port", str(_PORT)))
    if url := setting("default_scheduler_url", ""):
        address = urlsplit(url)
        host, port = address.hostname or host, address.port or {"http": 80, "https": 443}.get(address.scheme, port)
    named = any(setting(f"default_scheduler_{what}", "") for what in ("host", "port", "url"))
    wanted = {"true": False, "false": True}.get(setting("local_scheduler", "").lower(), named)
    try:
        with socket.create_connection((host, port), timeout=1.0):
            yield Check("luigid", "ok", f"answers on {host}:{port}")
    except OSError:
        advice = f"start luigid on {host}, or take it out of luigi.cfg" if wanted else ""
        found = f"none on {host}:{port}" + ("" if wanted else " (not needed: the local scheduler is used)")
        yield Check("luigid", "fail" if wanted else "ok", found, advice)
