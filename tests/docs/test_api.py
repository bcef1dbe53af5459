"""The API reference has every public name once, and the names that other pages tell people to import."""

from __future__ import annotations

import ast
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from docs import api
from docs.api import ApiPage, Found, NameNotFound, find_name, list_names, render_for_site, render_page
from tests.architecture.frozen import list_public_names
from tests.docs.blocks import iter_blocks
from tests.docs.test_docs import PAGES, ROOT

_SRC = ROOT / "src"
_WITHOUT_PAGE = {"holdfast.__version__"}
"""A constant, which the first page of the reference mentions."""


def _list_all() -> list[Found]:
    return [found for page in api.PAGES for found in list_names(_SRC, page)]


def find_undocumented(names: list[str]) -> list[str]:
    """Return the names that are neither on a page of the reference nor on the page of errors."""
    homes = {found.home for found in _list_all()}
    found = [find_name(_SRC, name) for name in names if name not in _WITHOUT_PAGE]
    return [each.public for each in found if each.home not in homes and not each.home.startswith("holdfast.errors.")]


def list_imported(text: str) -> list[str]:
    """Return the names that the Python blocks of a page import from modules of Holdfast."""
    blocks = [ast.parse(block.code) for block in iter_blocks(text) if block.language == "python" and not block.not_run]
    imports = [node for tree in blocks for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [
        f"{node.module}.{alias.name}"
        for node in imports
        for alias in node.names
        if node.module and node.module.startswith("holdfast.") and _is_name(node.module, alias.name)
    ]


def _is_name(module: str, name: str) -> bool:
    return not (_SRC / Path(*module.split("."), f"{name}.py")).is_file()


def test_every_public_name_is_in_the_reference() -> None:
    assert find_undocumented(list_public_names()) == []


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_imports_is_in_the_reference(page: str) -> None:
    assert find_undocumented(list_imported((ROOT / page).read_text(encoding="utf-8"))) == []


def test_a_name_without_a_page_is_reported() -> None:
    assert find_undocumented(["holdfast.digest.hash_bytes"]) == ["holdfast.digest.hash_bytes"]
    assert list_imported("```python\nfrom holdfast.digest import hash_bytes\n```\n") == ["holdfast.digest.hash_bytes"]


def test_each_name_is_on_one_page_and_importable() -> None:
    found = _list_all()

    assert [home for home, count in Counter(each.home for each in found).items() if count > 1] == []
    for each in found:
        module, _, name = each.home.rpartition(".")
        assert hasattr(import_module(module), name), each.home


def test_a_name_that_does_not_exist_ends_the_generation() -> None:
    with pytest.raises(NameNotFound, match=r"holdfast\.Shop: holdfast has no such name"):
        list_names(_SRC, ApiPage("x.md", "X", "About x.", ("holdfast.Shop",)))
    with pytest.raises(NameNotFound, match=r"there is no module holdfast\.shop"):
        find_name(_SRC, "holdfast.shop.Shop")


def test_a_page_lists_signatures_fields_and_first_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "holdfast").mkdir()
    (tmp_path / "holdfast/__init__.py").write_text("from holdfast.shop import Shop\n")
    (tmp_path / "holdfast/shop.py").write_text('''
class Shop:
    """Sells bread.

    Only in the morning.
    """

    open: bool
    loaves: int
    """How many are left."""

    def sell(self, count: int, *, warm: bool = True) -> None:
        """Sell `count`
        loaves."""

    @property
    def name(self) -> str:
        """Its name."""

    def _bake(self) -> None:
        pass
''')
    page = ApiPage("shop.md", "Shop", "About shops.", ("holdfast.Shop",))

    assert render_page(tmp_path, page).splitlines() == [
        "About shops.",
        "",
        "## `holdfast.Shop`",
        "",
        "Sells bread.",
        "",
        "- `open`: `bool`",
        "- `loaves`: How many are left.",
        "- `sell(count, *, warm=True)`: Sell `count` loaves.",
        "- `name`: Its name.",
    ]
    assert render_for_site(tmp_path, page) == "About shops.\n\n::: holdfast.Shop\n"


def test_a_page_lists_what_a_class_inherits_before_its_own_members(tmp_path: Path) -> None:
    (tmp_path / "holdfast").mkdir()
    (tmp_path / "holdfast/__init__.py").write_text("from holdfast.shop import Bakery\n")
    (tmp_path / "holdfast/place.py").write_text("class Place:\n    street: str\n    name: str\n")
    (tmp_path / "holdfast/shop.py").write_text("""
from typing import Protocol
from holdfast.place import Place

class Shop(Place, Protocol):
    owner: str

class Bakery(Shop, Place):
    name: bytes
""")
    page = ApiPage("shop.md", "Shop", "About shops.", ("holdfast.Bakery",))

    members = [line for line in render_page(tmp_path, page).splitlines() if line.startswith("- ")]

    assert members == ["- `street`: `str`", "- `name`: `bytes`", "- `owner`: `str`"]
    options = "    options:\n      members: [street, name, owner]\n"
    assert render_for_site(tmp_path, page) == f"About shops.\n\n::: holdfast.Bakery\n{options}"
