"""A headless Chromium that a test clicks in, over its debugging pipe: no driver and no package is needed.

Messages are those of the Chrome DevTools Protocol (https://chromedevtools.github.io/devtools-protocol), each ended by a
zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
PATIENCE = 60.0
"""Seconds that an answer may take on a busy machine."""


def program() -> str | None:
    """Where a Chromium is, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


_START = """
import fcntl, os, sys
ours = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for fd, place in zip(ours, (3, 4)):
    os.dup2(fd, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes the browser, which reads messages from descriptor 3 and writes to 4."""


class Page:
    """One tab."""

    def __init__(self, out: int, into: int) -> None:
        self._out, self._into, self._rest, self._id = out, into, b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        """What scripts threw, or the console was told as an error or a violated policy."""
        self.requests: list[str] = []
        """Addresses that were asked for;"""
        self.blocked: list[str] = []
        """and why some were not."""
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                found: dict[str, Any] = answer["result"]
                return found

    def _next(self) -> dict[str, Any]:
        given_up = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            more = os.read(self._out, 1 << 20)
            if not more or time.monotonic() > given_up:
                raise RuntimeError("the browser has ended, or says nothing")
            self._rest += more
        one, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(said["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif method == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.errors.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method == "Network.loadingFailed":
            self.blocked.append(said.get("blockedReason", ""))

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Loads a file on a screen of that size, and waits for its scripts."""
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.do("Emulation.setEmulatedMedia", features=theme)
        self.do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.do("Page.navigate", url=path.resolve().as_uri())
        given_up = time.monotonic() + PATIENCE
        while self.run("document.readyState + document.URL") != f"complete{path.resolve().as_uri()}":
            if time.monotonic() > given_up:
                raise RuntimeError(f"{path} does not load")
            time.sleep(0.02)
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, code: str) -> Any:
        """The value of an expression of JavaScript."""
        found = self.do("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", code))
        return found["result"].get("value")

    def point(self, selector: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        """Where an element is, once it is in view."""
        code = f"""(() => {{ const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{block: "center"}}); const r = e.getBoundingClientRect();
            return [r.left + r.width * {across}, r.top + r.height * {down}]; }})()"""
        x, y = self.run(code)
        return x, y

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" or more else {}
        self.do("Input.dispatchMouseEvent", type=kind, x=x, y=y, **{**button, **more})
        self._settle()

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        x, y = self.point(selector, across, down)
        self.mouse("mouseMoved", x - 3, y)
        self.mouse("mouseMoved", x, y)

    def click(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        x, y = self.point(selector, across, down)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x, y)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.do("Input.dispatchKeyEvent", type=kind, key=key, code=key)
        self._settle()

    def _settle(self) -> None:
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of what is seen, or of the whole page."""
        found = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])


@contextmanager
def browser() -> Iterator[Page]:
    """An empty tab in a browser of its own."""
    path = program()
    assert path is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        flags += [f"--user-data-dir={profile}", "--no-first-run", "--disable-dev-shm-usage", "--mute-audio"]
        starts = [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), path, *flags]
        process = subprocess.Popen(
            starts, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(ours_in, ours_out)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(ours_in)
            os.close(ours_out)
