"""What is done before the interpreter exits: its order, its errors, and the exit status of every kind of process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.patience import PATIENCE_S


def run(script: str, *, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script from a file, as the processes of multiprocessing need it."""
    words = [sys.executable, "-W", "error"]
    if folder is None:
        words += ["-c", script]
    else:
        (folder / "script.py").write_text(script)
        words += [str(folder / "script.py")]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_acts_are_called_in_stages_and_the_newest_first() -> None:
    script = """
import atexit, threading
from holdfast.objects.at_exit import before_exit
atexit.register(print, "an older callback")
goes_on = threading.Event()
before_exit(lambda: print("thread"), stage="threads")
before_exit(goes_on.set, stage="uploads")
before_exit(lambda: print("upload"), stage="uploads")
before_exit(lambda: print("first"))
before_exit(lambda: (print("second"), before_exit(lambda: print("added")), before_exit(print, stage="uploads")()))
before_exit(lambda: print("cancelled"))()
threading.Thread(target=lambda: (goes_on.wait(), print("no daemon"))).start()
"""
    ran = run(script)

    order = ["second", "added", "first", "upload", "no daemon", "thread", "an older callback"]
    assert (ran.returncode, ran.stdout.split("\n"), ran.stderr) == (0, [*order, ""], "")


@pytest.mark.parametrize("stage", ["work", "uploads", "threads"])
def test_an_error_is_shown_and_everything_else_is_still_done(stage: str) -> None:
    script = f"""
import atexit, sys
from holdfast.objects.at_exit import before_exit
atexit.register(lambda: (print("callback"), print("flushed", file=sys.stderr, flush=True)))
before_exit(lambda: print("older"), stage="{stage}")
before_exit(lambda: 1 // 0, stage="{stage}")
"""
    ran = run(script)

    assert (ran.returncode, ran.stdout) == (120, "older\ncallback\n")
    assert ran.stderr.count("Traceback") == 1
    assert ran.stderr.endswith("ZeroDivisionError: integer division or modulo by zero\nflushed\n")


@pytest.mark.parametrize(
    "change",
    [
        "sys.stderr.close(); sys.stderr = sys.__stderr__ = None",
        "sys.stderr = io.StringIO()",
        "first, sys.stderr = sys.stderr, io.StringIO(); atexit.register(lambda: setattr(sys, 'stderr', first))",
        "sys.excepthook = lambda *error: None",
        "sys.excepthook = None",
    ],
)
def test_the_status_does_not_depend_on_where_errors_are_written(change: str) -> None:
    script = f"""
import atexit, io, sys
from holdfast.objects.at_exit import before_exit
before_exit(lambda: print("older"))
{change}
before_exit(lambda: 1 // 0)
"""
    ran = run(script)

    assert (ran.returncode, ran.stdout) == (120, "older\n")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_of_multiprocessing_fails_too(tmp_path: Path, method: str) -> None:
    script = f"""
import multiprocessing
from holdfast.objects.at_exit import before_exit

def work(act):
    before_exit(act)

def fail():
    1 // 0

def main():
    before_exit(lambda: print("parent"))
    context = multiprocessing.get_context("{method}")
    for act in (fail, str):
        process = context.Process(target=work, args=(act,))
        process.start()
        process.join()
        print("failed" if process.exitcode else "succeeded")

if __name__ == "__main__":
    main()
"""
    ran = run(script, folder=tmp_path)

    assert (ran.returncode, ran.stdout) == (0, "failed\nsucceeded\nparent\n")
    assert ran.stderr.count("Traceback") == 1


def test_a_forked_child_does_what_it_has_added_and_nothing_of_its_parent() -> None:
    script = """
import os, sys
from holdfast.objects.at_exit import before_exit
before_exit(lambda: print("parent", flush=True))
if os.fork() == 0:
    before_exit(lambda: print("child", flush=True))
else:
    os.wait()
"""
    assert run(script).stdout == "child\nparent\n"


def test_work_that_begins_too_late_is_refused() -> None:
    script = """
import atexit
from holdfast.objects.at_exit import before_exit
before_exit(str)
atexit.register(before_exit, str)
"""
    assert (
        "RuntimeError: the interpreter is exiting: it is too late to start work in the background" in run(script).stderr
    )
