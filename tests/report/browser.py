"""Headless Chromium for tests, driven through its debugging pipe (no port, no further package).

The page gets an emulated width; what it logs as an error, what it throws and what it asks the network for are recorded.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe"),
)
PATIENCE = 60  # seconds for any one answer


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One browser with one page. A context manager."""

    def __init__(self, path: str):
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def files() -> None:  # the protocol's fixed places: 3 to read, 4 to write; aside first, they may be in the way
            aside = [fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in (to_browser, from_browser)]
            os.dup2(aside[0], 3)
            os.dup2(aside[1], 4)

        self._process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=files,
            close_fds=False,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self._read, False)
        self._buffer = b""
        self._next = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc) -> None:
        os.close(self._write)
        os.close(self._read)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(10)
        shutil.rmtree(self._profile, ignore_errors=True)

    # -- the protocol: JSON messages that end with a zero byte --
    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            answer = self._receive(until)
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
        raise TimeoutError(f"{method}: no answer in {PATIENCE} s")

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if time.monotonic() > until:
                raise TimeoutError(f"the browser said nothing for {PATIENCE} s")
            try:
                got = os.read(self._read, 1 << 20)
                if not got:
                    raise RuntimeError("the browser has ended")
                self._buffer += got
            except BlockingIOError:
                time.sleep(0.005)
        raw, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])

    # -- the page --
    def open(
        self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False, script: bool = True
    ) -> None:
        """Load a file in a window of this size; forgets what was recorded before."""
        self.errors, self.requests, self._loaded = [], [], False
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])
        self.send("Emulation.setScriptExecutionDisabled", value=not script)
        self.send("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + PATIENCE
        while not self._loaded:
            self._receive(until)

    def run(self, code: str) -> Any:
        """Value of a JavaScript expression in the page."""
        out = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in out:
            raise RuntimeError(json.dumps(out["exceptionDetails"])[:800])
        return out["result"].get("value")

    def key(self, name: str) -> None:
        """Press a named key, such as "ArrowRight"."""
        code = {"ArrowRight": 39, "ArrowLeft": 37, "Tab": 9, "Enter": 13, "Home": 36, "End": 35, "Escape": 27}[name]
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def move(self, query: str, share: float = 0.5) -> None:
        """Put the pointer on an element, at this share of its width."""
        box = self.run(
            f"(()=>{{const e=document.querySelector({json.dumps(query)});"
            "e.scrollIntoView({block:'center',behavior:'instant'});"
            "const b=e.getBoundingClientRect();return [b.left,b.top,b.width,b.height]})()"
        )
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] * share, y=box[1] + box[3] / 2)

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))
