"""A headless Chromium, driven over its DevTools protocol with tornado's WebSocket client (Luigi brings tornado)."""

import asyncio
import base64
import contextlib
import io
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no browser on this machine (apt-get install chromium)")


class Page:
    """One page of a browser; every call waits for its answer."""

    def __init__(self, address: str) -> None:
        from tornado.websocket import websocket_connect

        self._loop = asyncio.new_event_loop()
        self._socket = self._loop.run_until_complete(self._connect(websocket_connect, address))
        self._number = 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    @staticmethod
    async def _connect(connect: Any, address: str) -> Any:
        return await connect(address, max_message_size=1 << 28)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol; what the page complains about meanwhile is kept in ``errors``."""
        self._number += 1
        return self._loop.run_until_complete(self._call(self._number, method, parameters))

    async def _call(self, number: int, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        await self._socket.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            text = await asyncio.wait_for(self._socket.read_message(), timeout=30)
            assert text is not None, "the browser is gone"
            message = json.loads(text)
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(message["params"]["exceptionDetails"]["text"])
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str, *, seconds: float = 20.0) -> Any:
        """The value of an expression, once it is a true one."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(AssertionError):  # the page is being loaded
                if value := self.value(expression):
                    return value
            assert time.monotonic() < end, (expression, self.value("document.body && document.body.innerText"), self.errors)
            time.sleep(0.1)

    def text(self) -> str:
        return str(self.value("document.body.innerText"))

    def picture(self, path: Path, *, width: int, height: int) -> None:
        """What is seen, as a small PNG of few colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        time.sleep(0.3)
        found = self.call("Page.captureScreenshot", format="png", clip={"x": 0, "y": 0, "width": width, "height": height, "scale": 1})
        from PIL import Image  # matplotlib brings it

        with Image.open(io.BytesIO(base64.b64decode(found["data"]))) as image:
            image.convert("RGB").quantize(48).save(path, optimize=True)

    def close(self) -> None:
        self._socket.close()
        self._loop.close()


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Page]:
    """A browser with an empty page; its profile lies in ``folder``."""
    assert CHROMIUM is not None
    profile = folder / "profile"
    options = ["--headless=new", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--hide-scrollbars"]
    options += ["--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={profile}", "--disable-dev-shm-usage"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium refuses its sandbox to root
    process = subprocess.Popen(
        [CHROMIUM, *options, "about:blank"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    page = None
    try:
        port_file, end = profile / "DevToolsActivePort", time.monotonic() + 60
        while not port_file.exists() or not port_file.read_text().strip():
            assert process.poll() is None and time.monotonic() < end, "the browser did not start"
            time.sleep(0.05)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=20) as answer:
            targets = json.load(answer)
        page = Page(next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page"))
        yield page
    finally:
        if page is not None:
            page.close()
        process.terminate()
        process.wait(timeout=20)


if __name__ == "__main__":  # python tests/browser.py URL FILE WIDTH HEIGHT: pictures for the documentation
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as temporary, opened(Path(temporary)) as page_to_show:
        page_to_show.open(sys.argv[1])
        time.sleep(4)
        page_to_show.picture(Path(sys.argv[2]), width=int(sys.argv[3]), height=int(sys.argv[4]))
