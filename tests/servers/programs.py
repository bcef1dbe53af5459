"""Finds the servers that `make servers` installs, and starts and ends them."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from tests.kit.patience import PATIENCE_S

_POLL_S: Final = 0.05
_NODE_PROGRAMS: Final = Path(sys.prefix, "servers", "node_modules", ".bin")
"""Where `make servers` installs what npm provides."""


_LIBC: Final = ctypes.CDLL(None)
_PR_SET_PDEATHSIG: Final = 1
_STARTER: Final = ThreadPoolExecutor(1, "starts-servers")
"""Its thread starts every server: the kernel kills a server when the thread that started it ends, and a test may start
one on a thread that ends earlier than the test."""


def require_program(name: str) -> str:
    """Return the path of a server; skip the test if it is not installed."""
    folders = [str(Path(sys.executable).parent), str(_NODE_PROGRAMS), os.environ.get("PATH", "")]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        pytest.skip(f"{name} is not installed; `make servers` installs it")
    return found


def find_free_ports(count: int) -> list[int]:
    """Return ports of loopback that nothing listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in sockets]


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, also if its process is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ServerProcess:
    """A server in a process of its own, which can be killed and started again."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, url: str) -> None:
        """Start it, and wait until it answers a request to `url`, with whatever answer."""
        with self._log.open("ab") as log:
            self._process = _STARTER.submit(
                subprocess.Popen,
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._log.parent,
                preexec_fn=die_with_parent,
            ).result()
        end_s = time.monotonic() + PATIENCE_S
        while not answers(url):
            assert self._process.poll() is None, f"the server has ended: {self.read_log()}"
            assert time.monotonic() < end_s, f"the server does not answer: {self.read_log()}"
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Kill the process and wait until it has exited."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None

    def read_log(self) -> str:
        """Return the last lines that the server has printed."""
        return self._log.read_text(errors="replace")[-2000:]


@contextmanager
def running(command: Sequence[str], folder: Path, url: str) -> Iterator[ServerProcess]:
    """Run a server that keeps its files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    process = ServerProcess(command, folder / "log")
    try:
        process.start(url)
        yield process
    finally:
        # SeaweedFS takes half a minute to end in good order.
        process.kill()


def answers(url: str) -> bool:
    """Return whether a server answers at all; an answer that refuses the request counts."""
    try:
        urlopen(Request(url), timeout=PATIENCE_S).close()
    except URLError as error:
        return hasattr(error, "code")
    except OSError:
        return False
    return True
