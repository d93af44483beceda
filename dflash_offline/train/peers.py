"""Knows within seconds that another rank has died, and which one.

A rank that waits in a collective of GPUs never hears of a dead peer: the kernels spin until a timeout, which has to be
hours long because some work (a checkpoint on a slow disk) is done by one rank while the others wait. So every rank
keeps a TCP connection to rank 0 that carries nothing. When a process ends, however it does, its kernel closes the
connection; a host that loses power or network is missed by keep-alive probes. A rank that leaves in good order says so
first. Rank 0 tells the others who died. Each rank then has a few seconds to fail by itself, and is ended if it does not.
"""

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable

from dflash_offline.errors import TrainError

GRACE_S = 5.0  # for the main thread, which may know a better reason, and may be writing a file
GREETING_S, GREETING_BYTES = 5.0, 32  # for a whole greeting line; who says more, or takes longer, is no rank
STRANGERS = 128  # that may wait to be taken, beside the ranks
BYE, HELLO = b"bye\n", b"rank "
KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a silent host is given up after 50 s


class Peers:
    """The connections of one rank; use ``listen`` on rank 0 and ``connect`` on the others, then ``start`` on all.

    Attributes:
        dead: the rank that died first, once known.
        hosts: of each rank, once known; empty before.
    """

    def __init__(self, rank: int, size: int, *, end: Callable[[str], None] | None = None) -> None:
        self.rank, self.size, self.dead = rank, size, None
        self._end = end or _end_process
        self._sockets: dict[int, socket.socket] = {}
        self._known, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self.hosts: list[str] = []

    dead: int | None

    def listen(self) -> int:
        """Rank 0: the port that the others are to connect to."""
        try:
            self._listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=self.size + STRANGERS)
        except (OSError, ValueError):  # no IPv6 here
            self._listener = socket.create_server(("", 0), backlog=self.size + STRANGERS)
        return int(self._listener.getsockname()[1])

    def connect(self, host: str, port: int, *, timeout_s: float = 60.0) -> None:
        """Other ranks: connect to rank 0.

        Raises:
            TrainError: it cannot be reached.
        """
        try:
            connection = self._sockets[0] = socket.create_connection((host, port), timeout=timeout_s)
            connection.sendall(HELLO + f"{self.rank}\n".encode())
        except OSError as error:
            raise TrainError(f"rank {self.rank} of {self.size}: cannot reach rank 0 at {host}:{port} ({error.strerror or error})") from None

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Rank 0 takes the others' connections; then all watch in the background.

        Raises:
            TrainError: a rank does not connect.
        """
        if self._listener is not None:
            self._accept(timeout_s)
        for connection in self._sockets.values():
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEP_ALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def _accept(self, timeout_s: float) -> None:
        """Take one connection of each other rank. Whoever else connects (a port scanner, a health check) is closed and delays none."""
        assert self._listener is not None
        self._listener.setblocking(False)
        until = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            try:
                while len(self._sockets) < self.size - 1:
                    now = time.monotonic()
                    if now >= until:
                        missing = min(set(range(1, self.size)) - set(self._sockets))
                        raise TrainError(f"rank 0 of {self.size}: rank {missing} did not connect in {timeout_s:.0f}s")
                    for key, _ in selector.select(min(0.2, until - now)):
                        if key.data is None:
                            self._begin_greeting(selector)
                        elif (line := key.data.read()) is not None:
                            selector.unregister(key.fileobj)
                            self._take(key.data.connection, line)
                    for greeting in _greetings(selector):
                        if time.monotonic() >= greeting.until:
                            selector.unregister(greeting.connection)
                            greeting.connection.close()
            finally:
                for greeting in _greetings(selector):
                    greeting.connection.close()
        self._listener.close()

    def _begin_greeting(self, selector: selectors.BaseSelector) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):  # gone again already
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, _Greeting(connection))

    def _take(self, connection: socket.socket, line: bytes) -> None:
        """Keep the connection if its greeting is that of a rank that is still missing."""
        said = line.removeprefix(HELLO).strip()
        rank = int(said) if line.startswith(HELLO) and line.endswith(b"\n") and said.isdigit() else 0
        if 0 < rank < self.size and rank not in self._sockets:
            self._sockets[rank] = connection
        else:
            connection.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._sockets.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map() and not self._closed.is_set():
                for key, _ in selector.select(timeout=0.5):
                    try:
                        line = _line(key.fileobj)
                    except OSError:
                        line = b""
                    if line == BYE.strip():
                        selector.unregister(key.fileobj)
                    elif self._closed.is_set():
                        return
                    else:  # its process is gone; or rank 0 says whose is
                        self._say_dead(int(line) if line.isdigit() else key.data)
                        return

    def _say_dead(self, rank: int) -> None:
        self.dead = rank
        self._known.set()
        if self.rank == 0:
            for connection in self._sockets.values():
                with contextlib.suppress(OSError):
                    connection.sendall(f"{rank}\n".encode())
        if not self._closed.wait(GRACE_S):
            self._end(f"error: {self.obituary()}")

    def obituary(self) -> str:
        """One line on the rank that died."""
        assert self.dead is not None
        return f"rank {self.rank} of {self.size}: {self.name(self.dead)} ended before its time; its log says why"

    def name(self, rank: int) -> str:
        """How messages name a rank: with its host where that is another one."""
        elsewhere = self.hosts and self.hosts[rank] != self.hosts[self.rank]
        return f"rank {rank} on {self.hosts[rank]}" if elsewhere else f"rank {rank}"

    def who_died(self, *, wait_s: float = 2.0) -> int | None:
        """The rank that died; waits a little for the news."""
        self._known.wait(wait_s)
        return self.dead

    def close(self, *, in_order: bool) -> None:
        """Stop watching. ``in_order``: tell the others that this rank is done; else they take it for dead."""
        self._closed.set()
        for connection in self._sockets.values():
            if in_order:
                with contextlib.suppress(OSError):
                    connection.sendall(BYE)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        if self._thread is not None:
            self._thread.join(timeout=GRACE_S)
        for connection in self._sockets.values():
            connection.close()
        if self._listener is not None:
            self._listener.close()


class _Greeting:
    """The first line of a connection, as far as it has come; ``until``: when it has to be whole."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.until, self._line = connection, time.monotonic() + GREETING_S, b""

    def read(self) -> bytes | None:
        """The line once it is over, be it whole, too long or cut off; None before. What follows it is left in the connection."""
        try:
            while not self._line.endswith(b"\n") and len(self._line) < GREETING_BYTES:
                if not (more := self.connection.recv(1)):
                    break
                self._line += more
        except BlockingIOError:
            return None
        except OSError:
            return b""
        return self._line


def _greetings(selector: selectors.BaseSelector) -> list[_Greeting]:
    return [key.data for key in selector.get_map().values() if key.data is not None]


def _line(connection: object) -> bytes:
    """One line, without its end; what came of it at the end of the connection."""
    assert isinstance(connection, socket.socket)
    line = b""
    while not line.endswith(b"\n"):
        more = connection.recv(1)
        if not more:
            break
        line += more
    return line.strip()


def _end_process(line: str) -> None:
    """The main thread hangs in a collective that will never end: nothing can be tidied up."""
    print(line, file=sys.stderr, flush=True)
    os._exit(1)
