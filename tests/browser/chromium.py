"""A headless Chromium, driven by its own protocol over two pipes: no port, no driver program, no package to install."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from typing_extensions import Self

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_S: Final = 60.0
_INSTALL_S: Final = 400.0
_LEFT: Final = ("Inspected target navigated or closed", "Execution context was destroyed")
_FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",  # as root, where tests run in a container, it cannot have one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    # One process for all pages: starting one for each takes a quarter of the time of a test.
    "--disable-site-isolation-trials",
    "--renderer-process-limit=1",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
    "--window-size=1440,1000",
    "about:blank",
)
# What the browser reads from is 3, what it writes to is 4: the protocol says so.
_LAUNCH: Final = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'


def find_chromium() -> str | None:
    """Return the program, if this machine has one."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


def install_chromium() -> str | None:
    """Install Debian's, where that can be done without asking, and return the program."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return None
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "chromium"]):
        try:
            subprocess.run(["apt-get", *words], env=environment, capture_output=True, check=True, timeout=_INSTALL_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None
    return find_chromium()


class Browser:
    """One browser with one page; remembers what the page asked of the network and complained of."""

    def __init__(self, program: str, folder: Path) -> None:
        """Start it; `folder` takes its profile and its log."""
        out_of, into = os.pipe(), os.pipe()
        self._write, self._read = out_of[1], into[0]
        self._log = (folder / "chromium.log").open("wb")
        self._process = subprocess.Popen(
            ["bash", "-c", _LAUNCH, "bash", str(out_of[0]), str(into[1]), program, *self._list_flags(folder)],
            pass_fds=(out_of[0], into[1]),
            stdout=self._log,
            stderr=self._log,
        )
        os.close(out_of[0])
        os.close(into[1])
        fcntl.fcntl(self._read, fcntl.F_SETFL, os.O_NONBLOCK)
        self._pending = b""
        self._number = 0
        self._session = ""
        self._loaded: set[str] = set()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._attach()

    def _list_flags(self, folder: Path) -> list[str]:
        return [f"--user-data-dir={folder / 'profile'}", *_FLAGS]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, however the test went."""
        os.close(self._write)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._log.close()

    def _attach(self) -> None:
        page = next(info for info in self.call("Target.getTargets")["targetInfos"] if info["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                if "error" in found:
                    raise AssertionError(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result

    def _next(self) -> dict[str, Any]:
        """Return the next message; notes events on the way."""
        deadline = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._pending:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"chromium said nothing for {_TIMEOUT_S:g} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise EOFError(f"chromium has ended; see {self._log.name}")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Page.lifecycleEvent" and event["name"] == "load":
            self._loaded.add(event["loaderId"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{event['type']}: {json.dumps(event['args'])}")
        elif method == "Log.entryAdded":
            self.complaints.append(f"{event['entry']['level']}: {event['entry']['text']}")

    def open(self, path: Path) -> None:
        """Open a file, and wait until it is loaded."""
        self.visit(path.as_uri())

    def visit(self, url: str) -> None:
        """Open an address, and wait until it is loaded; an address on the same page is not loaded again."""
        self.requests.clear()
        self.complaints.clear()
        loader = self.call("Page.navigate", url=url).get("loaderId")
        # The blank page before it was loaded as well, and may say so late.
        while loader is not None and loader not in self._loaded:
            self._next()

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true; raises AssertionError after a minute."""
        script = (
            "new Promise((done) => { const start = performance.now(); const look = () => { let found = false;"
            f" try {{ found = Boolean({condition}); }} catch {{ found = false; }}"
            f" if (found || performance.now() - start > {1000 * _TIMEOUT_S / 2}) done(found);"
            " else setTimeout(look, 20); }; look(); })"
        )
        for _ in range(3):
            try:
                assert self.run(script), f"this did not become true: {condition}; {self.complaints}"
            except AssertionError as error:
                # A page that is being left cannot answer; the next one can.
                if not any(reason in str(error) for reason in _LEFT):
                    raise
            else:
                return
        raise AssertionError(f"one page after the other was left while waiting for: {condition}")

    def run(self, script: str) -> Any:
        """Return what a JavaScript expression, or its promise, is worth."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def read_busy_s(self) -> float:
        """Return how long the page's thread has computed so far."""
        return self._read_durations()["TaskDuration"]

    def read_script_s(self) -> float:
        """Return how long the page's thread has computed so far, without style and layout; a bound for its scripts.

        The browser's own figure for scripts leaves out what runs after a promise, which is most of this page.
        """
        found = self._read_durations()
        return found["TaskDuration"] - found["LayoutDuration"] - found["RecalcStyleDuration"]

    def _read_durations(self) -> dict[str, float]:
        self.call("Performance.enable", timeDomain="threadTicks")
        return {each["name"]: float(each["value"]) for each in self.call("Performance.getMetrics")["metrics"]}

    def press(self, key: str) -> None:
        """Press and release a key that has a name."""
        codes = {
            "Enter": 13,
            "Escape": 27,
            "ArrowDown": 40,
            "ArrowUp": 38,
            "ArrowLeft": 37,
            "ArrowRight": 39,
            "End": 35,
            "Tab": 9,
            " ": 32,
            "/": 191,
        }
        text = {"text": {"Enter": "\r", " ": " "}[key]} if key in ("Enter", " ") else {}
        parameters = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **parameters, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **parameters)

    def click(self, selector: str) -> None:
        """Click the middle of the element, as a pointer does."""
        place = self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            " node.scrollIntoView({block: 'center'}); const box = node.getBoundingClientRect();"
            " return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def emulate(self, *, scheme: str) -> None:
        """Prefer a light or a dark page."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def size(self, width: int, height: int) -> None:
        """Give the page a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write the visible part, or the whole page, as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
