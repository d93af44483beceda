"""A real S3-compatible server in a process of its own, for the tests of object stores."""

import contextlib
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

# each line of standard input closes the port, or opens it again; what is stored stays
_SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False)
while True:
    for change in (server.start, server.stop):
        change()
        print(flush=True)
        if not sys.stdin.readline():
            sys.exit()
"""


@dataclass(frozen=True)
class Server:
    endpoint: str
    process: subprocess.Popen

    def toggle(self) -> None:
        """Close the port, so that connections are refused; again, open it."""
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to use it, and nothing of the user's own."""
        return {
            "AWS_ACCESS_KEY_ID": "test-key-id",
            "AWS_SECRET_ACCESS_KEY": "test-secret-key",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def bucket(self, name: str) -> str:
        """Make a bucket; its URL."""
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT"), timeout=10).close()
        return f"s3://{name}"


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(port)],
        env=os.environ | {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout.readline(), "the S3 server did not start"
        yield Server(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.communicate()
