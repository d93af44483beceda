"""A real HTTP server with the OpenAI interface, on this machine, that misbehaves as a test wants. Not a test."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Reply:
    """What the server does with one request: an answer after ``delay_s``, another status, other bytes, or a dropped connection."""

    def __init__(
        self,
        content: str | None = "Fine.",
        *,
        status: int = 200,
        finish_reason: str = "stop",
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
        delay_s: float = 0.0,
        drop: bool = False,
        message: dict[str, Any] | None = None,
    ) -> None:
        self.status, self.headers, self.delay_s, self.drop = status, headers or {}, delay_s, drop
        said = {"role": "assistant", "content": content, **(message or {})}
        answer = {
            "choices": [{"index": 0, "message": said, "finish_reason": finish_reason}],
            "usage": {"completion_tokens": len((content or "").split())},
        }
        self.body = json.dumps(answer).encode() if body is None else body


def error(status: int, text: str = "no", **headers: str) -> Reply:
    return Reply(status=status, body=json.dumps({"error": {"message": text}}).encode(), headers=headers)


class ChatServer:
    """Answers ``/v1/chat/completions`` by ``behave(request, number)``, the how-many-eth request with these messages (from 1).

    Attributes:
        requests: bodies of all requests, in the order they came.
        most_at_once: requests that were being answered at the same time.
        authorizations: headers that came.
    """

    def __init__(self, behave: Callable[[dict[str, Any], int], Reply] | None = None, *, model: str = "tiny", port: int = 0) -> None:
        self.behave = behave or (lambda request, number: Reply("You said: " + request["messages"][-1]["content"]))
        self.model = model
        self.requests: list[dict[str, Any]] = []
        self.authorizations: set[str | None] = set()
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __enter__(self) -> "ChatServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                """Nothing on stderr."""

            def do_GET(self) -> None:
                server.authorizations.add(self.headers.get("Authorization"))
                listed = {"data": [{"id": server.model, "root": "models/tiny", "max_model_len": 512}]}
                self.send(Reply(body=json.dumps(listed).encode()) if self.path == "/v1/models" else error(404))

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = json.dumps(request.get("messages"))
                with server._lock:
                    server.authorizations.add(self.headers.get("Authorization"))
                    server.requests.append(request)
                    server.asked[name] += 1
                    number = server.asked[name]
                    server.at_once += 1
                    server.most_at_once = max(server.most_at_once, server.at_once)
                try:
                    reply = server.behave(request, number) if self.path == "/v1/chat/completions" else error(404, "no such path")
                    time.sleep(reply.delay_s)
                finally:
                    with server._lock:
                        server.at_once -= 1
                self.send(reply)
                if reply.status == 200 and not reply.drop:
                    with server._lock:
                        server.answered[name] += 1

            def send(self, reply: Reply) -> None:
                if reply.drop:
                    self.close_connection = True
                    self.connection.close()
                    return
                try:
                    self.send_response(reply.status)
                    for key, value in reply.headers.items():
                        self.send_header(key, value)
                    self.send_header("Content-Length", str(len(reply.body)))
                    self.end_headers()
                    self.wfile.write(reply.body)
                except OSError:
                    """The client did not wait."""

        return Handler
