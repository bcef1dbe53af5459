from __future__ import annotations

from pathlib import Path

from tests.matrix.environments import ROOT
from tests.slow.record import PAGE, FolderRun, Record, parse_page, read_seconds, render_page, replace_folder

FAULTS = FolderRun(passed=337, failed=1, unstable=2, skipped=3, minutes=21.4, commit="77d7cd18")
MODEL = FolderRun(passed=12, failed=0, unstable=0, skipped=0, minutes=1.0, commit="875899b3+")
RECORD = Record(
    {"tests/faults": FAULTS, "tests/model": MODEL},
    {"tests/faults/test_a.py": 12.5, "tests/faults/test_b.py": 900.0, "tests/model/test_c.py": 60.0},
)


def test_a_page_says_what_was_recorded() -> None:
    assert parse_page(render_page(RECORD)) == RECORD


def test_a_page_adds_up_the_folders() -> None:
    assert "| all | 349 | 1 | 2 | 3 | 22.4 | 77d7cd18, 875899b3+ |" in render_page(RECORD)


def test_a_new_run_of_a_folder_replaces_the_old_one() -> None:
    record = replace_folder(RECORD, "tests/faults", MODEL, {"tests/faults/test_d.py": 1.0})

    assert record.folders == {"tests/faults": MODEL, "tests/model": MODEL}
    assert record.seconds == {"tests/faults/test_d.py": 1.0, "tests/model/test_c.py": 60.0}


def test_the_seconds_of_a_file_are_those_of_its_tests(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase file="tests/a.py" name="x" time="1.5"/>'
        '<testcase file="tests/a.py" name="y" time="2.0"/><testcase file="tests/b.py" name="z" time="0.5"/>'
        "</testsuite></testsuites>"
    )

    assert read_seconds(report) == {"tests/a.py": 3.5, "tests/b.py": 0.5}


def test_the_page_of_the_project_is_as_it_was_written() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")

    assert render_page(parse_page(text)) == text
