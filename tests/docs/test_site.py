"""What the site must not do is reported: load from another host, link to a page or an anchor that does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.build_site import copy_pages, iter_problems
from tests.docs.test_docs import ROOT

_SOUND = """<html><head><link rel="stylesheet" href="style.css"></head><body><h1 id="top">a</h1>
<img src="picture.png"><a href="#top">x</a><a href="below/page.html#part">y</a><a href="https://pytorch.org">z</a></body></html>
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    (tmp_path / "index.html").write_text(_SOUND, encoding="utf-8")
    (tmp_path / "below" / "page.html").write_text('<h2 id="part"></h2><a href="../index.html">up</a>', encoding="utf-8")
    (tmp_path / "style.css").write_text('@font-face { src: url("font.woff") }', encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"")
    return tmp_path


def test_a_site_that_loads_and_links_only_what_it_has_is_sound(site: Path) -> None:
    assert list(iter_problems(site)) == []


@pytest.mark.parametrize(
    ("planted", "problem"),
    [
        ('<script src="https://cdn.example/x.js"></script>', "page.html: loads https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/css">', "page.html: loads //fonts.example/css"),
        ('<img src="http://images.example/a.png">', "page.html: loads http://images.example/a.png"),
        ('<source srcset="absent.png">', "page.html: loads absent.png, which does not exist"),
        ('<a href="absent.html">x</a>', "page.html: the link to absent.html leads nowhere"),
        ('<a href="../index.html#absent">x</a>', "leads to an anchor that does not exist"),
        ('<a href="#absent">x</a>', "page.html: the link to #absent leads to an anchor that does not exist"),
    ],
)
def test_a_planted_problem_of_a_page_is_reported(site: Path, planted: str, problem: str) -> None:
    (site / "below" / "page.html").write_text(f'<h2 id="part"></h2>{planted}', encoding="utf-8")

    assert [problem in found for found in iter_problems(site)] == [True]


def test_a_style_sheet_that_loads_from_another_host_is_reported(site: Path) -> None:
    (site / "style.css").write_text("@import 'https://fonts.example/css';", encoding="utf-8")

    assert list(iter_problems(site)) == ["style.css: loads https://fonts.example/css"]


def test_pages_are_copied_to_the_folders_that_they_have_in_the_repository(tmp_path: Path) -> None:
    copy_pages(ROOT, tmp_path / "pages")

    assert (tmp_path / "pages/docs/README.md").read_bytes() == (ROOT / "docs/README.md").read_bytes()
    assert (tmp_path / "pages/examples/train.py").is_file()
    assert "::: holdfast.Store\n" in (tmp_path / "pages/docs/reference/api/store.md").read_text(encoding="utf-8")
