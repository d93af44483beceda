"""``dflash-offline report --serve``: the live page of a run, on this machine only.

========================  =================================================
``/``                     the page; it fetches ``/data.json`` every 2 s
``/data.json``            ``Live.look()``
``/metrics``              the same numbers for Prometheus
``/report``               the finished report, once there is one
========================  =================================================

It listens on the loopback interface and answers only requests addressed to it by a loopback name, so that no page of
another site can read it through a browser (DNS rebinding). It only reads.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

from dflash_offline.config import RunConfig
from dflash_offline.errors import DFlashError
from dflash_offline.layout import Layout
from dflash_offline.manifest import read_json, write_json
from dflash_offline.report.live import Live
from dflash_offline.report.prometheus import CONTENT_TYPE, exposition
from dflash_offline.status import process_is_alive

HOST = "127.0.0.1"
PORT = 8790
_ALLOWED_HOSTS = {"127.0.0.1", "localhost", "[::1]"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Server(ThreadingHTTPServer):
    """Serves one run.

    Args:
        port: 0 takes a free one.

    Raises:
        DFlashError: the port is taken, or may not be used.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, config: RunConfig, *, port: int = PORT) -> None:
        self.live = Live(config)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise DFlashError(f"port {port} of {HOST} cannot be used ({error.strerror}); choose another one with --port") from None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "dflash-offline", ""

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in _ALLOWED_HOSTS:
            self._answer("this page is served to this machine only\n", status=HTTPStatus.FORBIDDEN)
            return
        try:
            self._route(self.path.partition("?")[0])
        except DFlashError as error:  # a damaged file under the root; the page says so and asks again
            self._answer(f"{error}\n", status=HTTPStatus.SERVICE_UNAVAILABLE)

    do_HEAD = do_GET  # noqa: N815

    def _route(self, path: str) -> None:
        if path == "/":
            self._answer(resources.files(__package__).joinpath("live.html").read_text(encoding="utf-8"), "text/html; charset=utf-8")
        elif path == "/data.json":
            self._answer(json.dumps(self.server.live.look(), ensure_ascii=False), "application/json")
        elif path == "/metrics":
            self._answer(exposition(self.server.live.look()), CONTENT_TYPE)
        elif path == "/report" and (page := self.server.live.page()) is not None:
            self._answer(page.read_text(encoding="utf-8"), "text/html; charset=utf-8")
        else:
            self._answer("there is no such page; / /data.json /metrics and, of a finished run, /report\n", status=HTTPStatus.NOT_FOUND)

    def _answer(self, text: str, kind: str = "text/plain; charset=utf-8", *, status: HTTPStatus = HTTPStatus.OK) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):  # the page was closed meanwhile
                self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line each."""


def address_file(layout: Layout) -> Path:
    return layout.all_logs / "serving.json"


@contextlib.contextmanager
def announced(server: Server) -> Iterator[None]:
    """While it serves, a file under ``logs/`` says where: luigid's page links to it."""
    path = address_file(server.live.layout)
    with contextlib.suppress(OSError, DFlashError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"url": server.url, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}, durable=False)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, DFlashError, KeyError, TypeError):
            if read_json(path)["pid"] == os.getpid():
                path.unlink()


def serving_url(layout: Layout) -> str | None:
    """Where the live page of this root is served on this host now; None where it is not."""
    with contextlib.suppress(OSError, DFlashError, KeyError, TypeError):
        found = read_json(address_file(layout))
        if found["host"] == socket.gethostname() and process_is_alive(found["pid"]):
            return str(found["url"])
    return None
