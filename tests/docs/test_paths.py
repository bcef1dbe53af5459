"""Every file and folder of the repository that a page names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

from docs.api import NameNotFound, find_name
from tests.docs.test_docs import ROOT

PAGES: Final = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "tests/README.md",
        "bench/README.md",
        "attacks/README.md",
        "docs/mkdocs.yml",
    )
    for path in ROOT.glob(pattern)
    if path.name not in ("CHANGELOG.md", "code-map.md")  # the first tells the past, the second is a tree
)
_NAMED: Final = re.compile(r"(?<![\w/.@{}<>*-])(?:\.\./)*((?:[\w.-]+/)+[\w.-]*\w/?|\w+\.py\b)")
_DOTTED: Final = re.compile(r"(?<![\w/.@-])holdfast(?:\.[A-Za-z_]\w*)+(?!\.\w)")
_TOPS: Final = ("src", "tests", "docs", "bench", "examples", "attacks", ".ci")
_SUFFIXES: Final = (".py", ".md", ".json", ".yml", ".txt", ".css", ".png", "/")
_OF_THE_READER: Final = {"evaluate.py", "warm_up.py"}
"""Scripts that a page imagines."""


def iter_missing(page: str, text: str, root: Path) -> Iterator[str]:
    """Yield the paths that a page names and that do not exist; a bare `name.py` may be in any folder."""
    folders = [root, root / "src/holdfast", root / "tests", (root / page).parent]
    names = {file.name for top in _TOPS for file in (root / top).rglob("*.py")}
    for named in dict.fromkeys(_NAMED.findall(text)):
        # Other paths are examples of a store or of the user's files.
        is_ours = named.split("/")[0] in _TOPS or named.endswith(".py")
        if not is_ours or not named.endswith(_SUFFIXES) or named in _OF_THE_READER:
            continue
        if not (named in names or any((folder / named).exists() for folder in folders)):
            yield named


def iter_unknown_names(text: str, src: Path) -> Iterator[str]:
    """Yield the dotted names of Holdfast that a page mentions and the source does not define."""
    for named in dict.fromkeys(_DOTTED.findall(text)):
        words = named.split(".")
        parts = [".".join(words[:count]) for count in range(1, len(words) + 1)]
        modules = [part for part in parts if _is_module(src / part.replace(".", "/"))]
        rest = words[len(modules) :]
        if rest:
            try:
                find_name(src, f"{modules[-1]}.{rest[0]}")
            except NameNotFound:
                yield named


def _is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("page", PAGES)
def test_the_modules_and_names_that_a_page_mentions_exist(page: str) -> None:
    assert list(iter_unknown_names((ROOT / page).read_text(encoding="utf-8"), ROOT / "src")) == []


_RESOLVE: Final = """
import sys
import holdfast

assert "torch" not in sys.modules
for named in sys.argv[1:]:
    found = holdfast
    for word in named.split(".")[1:]:
        try:
            found = getattr(found, word)
        except AttributeError as error:
            sys.stdout.write(f"{named}: {error}\\n")
            break
        except ImportError as error:
            # A framework that is not installed: the module of Holdfast was found.
            assert not (error.name or "").startswith("holdfast"), named
            break
"""


def resolve_names(names: Iterable[str], *, after: str = "import holdfast") -> list[str]:
    """Return a line for each name that is no attribute after `import holdfast` and no other import."""
    program = f"{after}\n{_RESOLVE}"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *names], capture_output=True, text=True, check=True
    )
    return [line for line in ran.stdout.splitlines() if line.startswith("holdfast")]  # frameworks print, too


@pytest.mark.slow
def test_every_name_that_a_page_mentions_is_an_attribute_after_import_holdfast() -> None:
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    names = sorted({named for text in texts for named in _DOTTED.findall(text)})

    assert len(names) > 100
    assert resolve_names(names) == []


@pytest.mark.parametrize(
    "loaded", ["", "import holdfast.repo.format.boxes", "from holdfast import repo", "import holdfast.repo"]
)
def test_a_module_is_an_attribute_whatever_was_imported_before(loaded: str) -> None:
    names = ["holdfast.repo.format.boxes.Box", "holdfast.repo.read.stream.RangeView", "holdfast.progress.Progress"]

    assert resolve_names(names, after=loaded) == []


def test_what_is_no_module_is_no_attribute() -> None:
    names = ["holdfast.nothing", "holdfast.repo.nothing", "holdfast.repo.format.boxes.nothing", "holdfast._nothing"]

    assert resolve_names(names) == [
        "holdfast.nothing: module 'holdfast' has no attribute 'nothing'",
        "holdfast.repo.nothing: module 'holdfast.repo' has no attribute 'nothing'",
        "holdfast.repo.format.boxes.nothing: module 'holdfast.repo.format.boxes' has no attribute 'nothing'",
        "holdfast._nothing: module 'holdfast' has no attribute '_nothing'",
    ]


def test_a_module_that_does_not_exist_is_reported() -> None:
    text = (
        "`holdfast.open`, `holdfast.dcp.StorageReader.reset`, holdfast.repo, `holdfast.dcp.no`, `holdfast.cloud.open`"
    )

    assert list(iter_unknown_names(text, ROOT / "src")) == ["holdfast.dcp.no", "holdfast.cloud.open"]


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(page: str) -> None:
    assert list(iter_missing(page, (ROOT / page).read_text(encoding="utf-8"), ROOT)) == []


def test_a_file_that_does_not_exist_is_reported() -> None:
    text = (
        "`objects/cloud.py`, `tests/absent/`, [x](../../docs/absent.md), errors.py, `repo/format/pack.py`, `packs/ab`"
    )

    assert list(iter_missing("docs/how-to/page.md", text, ROOT)) == [
        "objects/cloud.py",
        "tests/absent/",
        "docs/absent.md",
    ]


def test_the_table_of_test_folders_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|", (ROOT / "tests/README.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert sorted(rows) == sorted({path.parent.name for path in (ROOT / "tests").glob("*/*.py")} | {"unit"})
