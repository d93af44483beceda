"""Requests to servers with the OpenAI interface: spread, retried, and the key never told to anyone but them.

What may pass is tried again: no connection, a dropped one, a time-out, 408, 425, 429, any 5xx, an answer that is no
JSON. The waits double from ``retry_wait_s`` up to 30 s, with jitter; a time that the server names in Retry-After is
kept. A server that cannot be reached, or that names a time, gets nothing until its pause is over, while the others go
on. A server that refuses the key or does not know the address ends the run: no row is to blame for it. So does a
request that ran out of tries when nothing else was answered meanwhile.

``http.client`` with a connection for each request: no redirects are followed and no proxies are used, so the key goes
to the named servers only.
"""

import email.utils
import http.client
import json
import os
import random
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dflash_offline.config import RegenerateConfig
from dflash_offline.errors import RegenerateError

LONGEST_WAIT_S = 30.0
LONGEST_RETRY_AFTER_S = 600.0
CONNECT_S = 10.0
MAX_ANSWER_BYTES = 64 << 20
_TRANSIENT = {408, 425, 429}


class RequestRefused(Exception):
    """One request that gets no answer. ``reason`` is counted; ``detail`` says what the server said."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class Stopped(Exception):
    """The run is ending: nothing more is asked."""


class _Passing(Exception):
    """A fault that may pass. ``retry_after_s`` as the server named it; ``unreachable``: no connection came about."""

    def __init__(self, problem: str, *, retry_after_s: float | None = None, unreachable: bool = False) -> None:
        super().__init__(problem)
        self.retry_after_s, self.unreachable = retry_after_s, unreachable


@dataclass
class _Server:
    url: str
    in_flight: int = 0
    free_at: float = 0.0  # nothing is sent before
    pauses: int = 0  # one after another, without an answer in between
    problem: str = ""  # the last one
    said: bool = False  # that it cannot be reached


def read_key(name: str | None) -> str | None:
    """The key out of the environment variable ``name``.

    Raises:
        RegenerateError: it is not set, or cannot be sent in a header. Neither the name nor the value is printed: somebody
            may have written the key itself where its variable's name belongs.
    """
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise RegenerateError("[regenerate] api_key_env: the environment variable that it names is not set; export it before the command")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise RegenerateError("[regenerate] api_key_env: the variable that it names holds characters that no key has; look for line breaks")
    return key


class Servers:
    """The servers of a run file.

    Args:
        section: addresses, concurrency, retries, waits.
        key: sent as a bearer token; taken out of every text that a server sends back.
        say: gets a line when a server stops or begins to answer.
    """

    def __init__(self, section: RegenerateConfig, *, key: str | None, say: Callable[[str], None]) -> None:
        self.section, self._key, self.say = section, key, say
        self.stopped = threading.Event()
        self._servers = [_Server(url.rstrip("/")) for url in section.base_urls]
        self._changed = threading.Condition()
        self._answered_at = float("-inf")
        self._tls = ssl.create_default_context() if any(url.startswith("https:") for url in section.base_urls) else None

    def stop(self) -> None:
        """Wake whoever waits; nothing more is sent."""
        self.stopped.set()
        with self._changed:
            self._changed.notify_all()

    @property
    def in_flight(self) -> int:
        with self._changed:
            return sum(server.in_flight for server in self._servers)

    # -- one request -------------------------------------------------------------------------------------------------

    def post(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Send a request to one of the servers, again and again if need be -> the JSON object it answers.

        Raises:
            RequestRefused: this request gets no answer, others do.
            RegenerateError: no request would.
            Stopped: ``stop`` was called.
        """
        body = json.dumps(payload).encode()
        began, failures = time.monotonic(), 0
        while True:
            server = self._enter()
            sent_at = time.monotonic()
            try:
                answer = self._exchange(server, "POST", path, body)
            except _Passing as fault:
                self._pause(server, fault, sent_at)
                self._leave(server)
                waits = fault.retry_after_s is not None and time.monotonic() - self._answered_at < 60 + 2 * fault.retry_after_s
                failures += not waits  # a busy server that answers others is waited for as long as it takes
                if failures > self.section.retries:
                    raise self._give_up(str(fault), began, failures) from None
                if fault.retry_after_s is None and not fault.unreachable:
                    self.stopped.wait(self._backoff(failures))
            except BaseException:
                self._leave(server)
                raise
            else:
                self._succeed(server)
                self._leave(server)
                return answer

    def models(self, *, required: bool) -> list[dict[str, Any]]:
        """What the servers list as their models; those that do not answer, or list none, are left out.

        Args:
            required: try again until one of them answers.

        Raises:
            RegenerateError: ``required``, and none does.
        """
        for attempt in range(self.section.retries + 1 if required else 1):
            self.stopped.wait(self._backoff(attempt) if attempt else 0)
            found: list[dict[str, Any]] = []
            answered = False
            for server in self._servers:
                try:
                    listed = self._exchange(server, "GET", "/models", None, timeout_s=CONNECT_S, strict=required).get("data")
                except (_Passing, RequestRefused) as fault:
                    server.problem = str(fault) if isinstance(fault, _Passing) else fault.detail
                    continue
                answered = True
                found.extend(entry for entry in (listed if isinstance(listed, list) else []) if isinstance(entry, dict) and entry.get("id"))
            if answered:
                return found
        if required:
            raise self._no_server()
        return []

    def _exchange(
        self, server: _Server, method: str, path: str, body: bytes | None, *, timeout_s: float | None = None, strict: bool = True
    ) -> dict[str, Any]:
        """One request, one answer. ``strict``: a refused key or an unknown address is an error of the run."""
        parts = urlsplit(server.url)
        where = f"{server.url}{path}"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        options = {"context": self._tls} if parts.scheme == "https" else {}
        timeout_s = timeout_s or self.section.timeout_s
        connection = kind(parts.hostname, parts.port, timeout=min(CONNECT_S, timeout_s), **options)
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            try:
                connection.connect()
            except ssl.SSLCertVerificationError as error:
                raise RegenerateError(f"{where}: its certificate is not trusted ({error.verify_message})") from None
            except OSError as error:
                raise _Passing(f"{where}: {_problem(error)}", unreachable=True) from None
            connection.sock.settimeout(timeout_s)
            try:
                connection.request(method, parts.path + path, body=body, headers=headers)
                response = connection.getresponse()
                content = response.read(MAX_ANSWER_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise _Passing(f"{where}: {_problem(error)}") from None
        finally:
            connection.close()
        return self._understood(where, response, content, strict=strict)

    def _understood(self, where: str, response: http.client.HTTPResponse, content: bytes, *, strict: bool) -> dict[str, Any]:
        status = response.status
        if status == 200:
            try:
                answer = json.loads(content)
            except ValueError:
                answer = None
            if not isinstance(answer, dict):
                raise _Passing(f"{where}: the answer is no JSON object ({len(content)} bytes)")
            return answer
        said = f"{where}: {status} {self._scrubbed(_message(content) or response.reason)}"
        if status in _TRANSIENT or status >= 500:
            raise _Passing(said, retry_after_s=_retry_after(response.headers.get("Retry-After")))
        if status in (401, 403) and strict:
            raise RegenerateError(f"{said}; the servers want a key: name its environment variable in [regenerate] api_key_env")
        if status == 404 and strict:
            raise RegenerateError(f"{said}; check [regenerate] base_urls (they end with /v1 as a rule) and model")
        if 300 <= status < 400 and strict:
            raise RegenerateError(f"{said}: it sends elsewhere; name that address in [regenerate] base_urls")
        raise RequestRefused(f"refused by the server ({status})", said)

    def _scrubbed(self, text: str) -> str:
        if self._key:
            text = text.replace(self._key, "***")  # first: the cut must not leave half a key
        return " ".join(text.split())[:300]

    # -- which server, and when --------------------------------------------------------------------------------------

    def _enter(self) -> _Server:
        """The least busy server that may be asked now; waits for one."""
        with self._changed:
            while not self.stopped.is_set():
                now = time.monotonic()
                free = [server for server in self._servers if server.in_flight < self.section.concurrency and server.free_at <= now]
                if free:
                    server = min(free, key=lambda server: server.in_flight)
                    server.in_flight += 1
                    return server
                ends = [server.free_at - now for server in self._servers if server.free_at > now]
                self._changed.wait(min(ends) if ends else None)
        raise Stopped

    def _leave(self, server: _Server) -> None:
        with self._changed:
            server.in_flight -= 1
            self._changed.notify()

    def _pause(self, server: _Server, fault: _Passing, sent_at: float) -> None:
        """Send nothing to a server for a while if it cannot be reached, or says so itself."""
        said = ""
        with self._changed:
            server.problem = str(fault)
            if sent_at < server.free_at or not (fault.unreachable or fault.retry_after_s is not None):
                return  # sent before the pause that the same trouble has caused already
            server.pauses += 1
            wait_s = max(fault.retry_after_s or 0.0, self._backoff(server.pauses if fault.unreachable else 1))
            server.free_at = time.monotonic() + wait_s
            if fault.unreachable and not server.said:
                server.said = True
                others = len(self._servers) - 1
                said = f"{fault}; {'the others go on' if others else 'it is tried again'}"
        if said:
            self.say(said)

    def _succeed(self, server: _Server) -> None:
        with self._changed:
            self._answered_at = time.monotonic()
            again, server.said, server.pauses, server.free_at = server.said, False, 0, 0.0
            if again:
                self._changed.notify_all()
        if again:
            self.say(f"{server.url} answers again")

    def _backoff(self, count: int) -> float:
        return min(LONGEST_WAIT_S, self.section.retry_wait_s * 2 ** max(0, count - 1)) * random.uniform(0.75, 1.25)

    def _give_up(self, problem: str, began: float, tries: int) -> Exception:
        if self._answered_at > began:
            return RequestRefused("no answer in spite of retries", f"{problem} ({tries} tries)")
        return self._no_server()

    def _no_server(self) -> RegenerateError:
        problems = "; ".join(server.problem for server in self._servers if server.problem)
        return RegenerateError(
            f"no server answers: {problems}; start it, or correct [regenerate] base_urls. What is answered already is kept"
        )


def _problem(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, http.client.HTTPException):
        return f"the connection was dropped ({type(error).__name__})"
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


def _message(content: bytes) -> str:
    """The text of an error: ``error.message``, ``message`` or ``detail`` of a JSON object, else the beginning of the body."""
    text = content[:2000].decode("utf-8", "replace")
    try:
        found = json.loads(content)
    except ValueError:
        return text
    for _ in range(2):
        if isinstance(found, dict):
            found = next((found[name] for name in ("error", "message", "detail") if found.get(name)), text)
    return found if isinstance(found, str) else text


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return min(LONGEST_RETRY_AFTER_S, max(0.0, seconds)) if seconds == seconds else None
