"""The generated pages say what the code says."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from docs.generate import CODE_MAP, PACKAGE, find_stale, render_cli, render_pages
from tests.architecture.sources import ROOT


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the code and of its generated pages, which a test may change."""
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in render_pages(tmp_path).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return tmp_path


def test_generated_pages_are_up_to_date() -> None:
    assert find_stale(ROOT) == [], "run `make docs`"


def test_a_new_module_makes_the_code_map_stale(copy: Path) -> None:
    (copy / PACKAGE / "planted.py").write_text('"""A planted module."""\n', encoding="utf-8")

    assert find_stale(copy) == [CODE_MAP]


def test_a_new_error_makes_the_errors_page_stale(copy: Path) -> None:
    with (copy / PACKAGE / "errors.py").open("a", encoding="utf-8") as file:
        file.write('\n\nclass Planted(HoldfastError):\n    """A planted error."""\n')

    assert find_stale(copy) == ["docs/reference/errors.md"]


def test_a_missing_page_is_stale(copy: Path) -> None:
    (copy / "docs/reference/errors.md").unlink()

    assert find_stale(copy) == ["docs/reference/errors.md"]


def test_the_command_line_page_names_every_argument() -> None:
    parser = argparse.ArgumentParser(prog="holdfast", description="Look after a store.")
    parser.add_argument("-s", "--store", metavar="STORE", help="where the store is")
    verb = parser.add_subparsers().add_parser("rm", description="Delete snapshots.", epilog="Nothing is freed yet.")
    verb.add_argument("names", metavar="NAME", nargs="+", help="what to delete")
    verb.add_argument("--keep", type=int, default=3, help="how many to keep (default %(default)s)")

    page = render_cli(parser)

    assert "## holdfast\n\nLook after a store.\n\n- `-s, --store STORE`: where the store is\n" in page
    assert "## holdfast rm\n\nDelete snapshots.\n" in page
    assert "- `NAME [NAME ...]`: what to delete\n- `--keep KEEP`: how many to keep (default 3)\n" in page
    assert page.endswith("\nNothing is freed yet.\n")
