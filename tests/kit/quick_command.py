"""A `holdfast` command that starts quickly: each call is forked from a process that has torch and all verbs loaded.

Importing torch takes 1.7 CPU seconds, which is most of what a short command takes. What a new interpreter does, and
what a verb imports, needs the installed script.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_PRELOADED: Final = (
    "torch",
    "rich.progress",
    "holdfast.capture.compare.compare",
    "holdfast.capture.report.report",
    "holdfast.cli.main",
    "holdfast.cli.verbs.run",
    "holdfast.diff.values",
    "holdfast.store",
    "holdfast.formats.export",
    "holdfast.formats.importing",
)
_CLIENT: Final = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    request = {{"argv": sys.argv, "cwd": os.getcwd(), "environ": dict(os.environ)}}
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    sys.exit(server.recv(1)[0])
"""


@contextmanager
def provide_command() -> Iterator[Path]:
    """Return a folder for PATH whose `holdfast` runs in such a process; it ends with the `with`."""
    with TemporaryDirectory(prefix="holdfast-") as folder:
        script, address = Path(folder, "holdfast"), str(Path(folder, "socket"))
        script.write_text(_CLIENT.format(python=sys.executable, address=address), encoding="utf-8")
        script.chmod(0o755)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.quick_command", address], cwd=ROOT, stdout=subprocess.PIPE
        )
        with server:
            try:
                assert server.stdout is not None
                assert server.stdout.readline() == b"ready\n"
                yield Path(folder)
            finally:
                server.kill()


def serve(address: str) -> None:
    """Fork a process for each request; return in that process, once it is what the request asks for."""
    for name in _PRELOADED:
        import_module(name)
    gc.freeze()  # a collection would copy the memory that forked processes share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the processes that answer
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        os.write(1, b"ready\n")
        while True:
            client, _ = listener.accept()
            if os.fork() == 0:
                break
            client.close()
    with client:
        _answer(client)


def _answer(client: socket.socket) -> None:
    """Fork the process that runs the command, and report its exit code; return in that process alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
    command = os.fork()
    if command != 0:
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(command, 0)
        code = os.waitstatus_to_exitcode(status)
        client.send(bytes([code if code >= 0 else 128 - code]))
        os._exit(0)
    request = json.loads(message)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    by_line = 1 if request["environ"].get("PYTHONUNBUFFERED") else -1
    sys.stdout = open(1, "w", closefd=False, encoding="utf-8", buffering=by_line)  # noqa: SIM115 - as above
    sys.stderr = open(2, "w", closefd=False, encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = request["argv"]


def run_command() -> None:
    """Run the command line and end the process, without freeing every object of it, which takes a second."""
    try:
        code: int = import_module("holdfast.cli.main").main()
    except SystemExit as end:
        code = int(end.code or 0)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
    run_command()
