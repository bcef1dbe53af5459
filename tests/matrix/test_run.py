"""Runs of pytest are planned from the selection, and what did not end is not recorded."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests.kit.hooking import Hook
from tests.matrix.results import Outcome
from tests.matrix.run import NotRun, iter_outcomes, main, plan_runs
from tests.matrix.selection import CORE, SLOW

_REPORT = '<testsuites><testsuite><testcase classname="a" name="b"/></testsuite></testsuites>'


def make_python(folder: Path, *, status: int) -> Path:
    """Return a program that writes a report where pytest would, and exits with a status."""
    program = folder / "python"
    write = f"for word; do case $word in --junitxml=*) echo '{_REPORT}' > ${{word#*=}};; esac; done"
    program.write_text(f"#!/bin/bash\n{write}\nexit {status}\n", encoding="utf-8")
    program.chmod(0o755)
    return program


def test_the_first_run_has_all_core_suites_and_leaves_out_what_needs_one_torch() -> None:
    first, second = plan_runs("2")

    assert first[: len(CORE)] == list(CORE)
    assert {"--ignore=tests/unit/compile_cache", "--ignore=tests/unit/integrations"} <= set(first)
    assert "--ignore=tests/architecture" not in first
    assert second == [*SLOW, "-m", "slow"]


@pytest.mark.parametrize("status", [0, 1])
def test_a_run_that_ended_is_read(tmp_path: Path, status: int) -> None:
    python = make_python(tmp_path, status=status)

    assert list(iter_outcomes(python, [["a"], ["b"]], tmp_path)) == [Outcome(passed=1)] * 2


def test_a_run_that_was_interrupted_is_not_recorded_although_it_left_a_report(tmp_path: Path) -> None:
    python = make_python(tmp_path, status=2)

    with pytest.raises(NotRun, match=r"^pytest ended with status 2, so nothing was recorded; its output is above$"):
        list(iter_outcomes(python, [["a"]], tmp_path))


def test_arguments_for_pytest_run_without_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    python = make_python(tmp_path, status=1)
    monkeypatch.setenv("HOLDFAST_MATRIX", str(tmp_path))
    monkeypatch.setattr("tests.matrix.run.build_environment", lambda pair, place: python)
    hook.forbid(resolve_name("tests.matrix.run"), "write_result")

    assert main(["3.10-2.6", "--", "tests/unit", "-k", "pack"]) == 1
