"""A real S3-compatible server in a process of its own, for the tests of object stores."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

_SERVE = "from moto.server import main; import sys; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"


@dataclass(frozen=True)
class Server:
    endpoint: str

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
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the S3 server did not start"
                time.sleep(0.1)
        yield Server(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()
