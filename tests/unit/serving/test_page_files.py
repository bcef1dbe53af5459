"""The files of the page: a fixed list, complete, and without anything from elsewhere."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from holdfast.serving.server import POLICY, find_page_file


def _read(path: str) -> str:
    found = find_page_file(path)
    assert found is not None, path
    assert isinstance(found.body, bytes)
    return found.body.decode()


def test_every_file_of_the_folder_is_served() -> None:
    names = {each.name for each in (files("holdfast.serving") / "page").iterdir()} - {"index.html"}

    assert names
    assert all(_read(f"/page/{name}") for name in names)


def test_what_the_page_and_its_modules_ask_for_is_served() -> None:
    wanted = re.findall(r'(?:href|src)="(/page/[^"]+)"', _read("/"))
    seen: set[str] = set()
    while wanted:
        path = wanted.pop()
        if path not in seen:
            seen.add(path)
            wanted += [f"/page/{name}" for name in re.findall(r'from "\./([\w.]+)"', _read(path))]

    assert {"/page/main.js", "/page/elements.js", "/page/histogram.js", "/page/report.css"} <= seen


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/../server.py",
        "/page/%2e%2e/server.py",
        "/page//etc/passwd",
        "/index.html",
        "/page/index.html/..",
        "page/main.js",
        "/main.js",
        "/page/main.js/",
    ],
)
def test_no_other_path_is_a_file(path: str) -> None:
    assert find_page_file(path) is None


def test_nothing_is_loaded_from_elsewhere_and_no_text_becomes_markup() -> None:
    texts = {
        name: _read(f"/page/{name}")
        for name in (
            *(each.name for each in (files("holdfast.serving") / "page").iterdir()),
            "elements.js",
            "report.css",
        )
        if name.endswith((".js", ".css"))
    }

    for name, text in texts.items():
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
    assert "unsafe" not in POLICY
    assert POLICY.startswith("default-src 'none'")
