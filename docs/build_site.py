"""Build the site: copy the pages, add the API reference, run mkdocs with warnings as errors, and check the result.

`python docs/build_site.py` needs the extra `docs`; `make docs` installs it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

ROOT: Final = Path(__file__).resolve().parents[1]
# `python docs/build_site.py` puts docs/ itself on the path, and `import docs` needs what is above it.
if not __package__:
    sys.path[0] = str(ROOT)

from docs import api  # noqa: E402 - the path comes first

CONFIG: Final = "docs/mkdocs.yml"
PAGES: Final = "build/pages"
SITE: Final = "site"
# All that a page links to, in the folders of the repository: relative links need no translation.
COPIED: Final = (
    "*.md",
    "docs/**/*.md",
    "docs/pictures/*.png",
    "docs/site.css",
    "*/README.md",
    "tests/*/last_run.md",
    "examples/*.py",
    "bench/faults.py",
)
_LOADED: Final = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("img", "srcset"),
    ("source", "srcset"),
    ("iframe", "src"),
}
_IN_CSS: Final = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


def copy_pages(root: Path, target: Path) -> None:
    """Copy every page and what pages link to; the pages of the API get their signatures from mkdocstrings."""
    shutil.rmtree(target, ignore_errors=True)
    for file in sorted({file for pattern in COPIED for file in root.glob(pattern)}):
        copy = target / file.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    for page in api.PAGES:
        text = f"# {page.title}\n\n{api.render_for_site(root / 'src', page)}"
        (target / api.FOLDER / page.file).write_text(text, encoding="utf-8")


class _Page(HTMLParser):
    """Collects from one HTML page what it loads, where it links to, and which anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif (tag, name) in _LOADED and value:
                self.loaded.append(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.append(value)


def iter_problems(site: Path) -> Iterator[str]:
    """Yield what is wrong with a site: anything it would load from another host, and links that lead nowhere."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        if path.name == "404.html":  # its links are absolute: it is shown for any address
            continue
        for address in page.loaded:
            if _is_remote(address):
                yield f"{name}: loads {address}"
            elif not address.startswith("data:") and not _find_target(path, address).is_file():
                yield f"{name}: loads {address}, which does not exist"
        for address in page.links:
            yield from (f"{name}: {problem}" for problem in _iter_link_problems(path, address, pages))
    for path in sorted(site.rglob("*.css")):
        for address in _IN_CSS.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: loads {address}"


def _is_remote(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def _find_target(page: Path, address: str) -> Path:
    path = unquote(urlsplit(address).path)
    return (page.parent / path).resolve() if path else page


def _iter_link_problems(page: Path, address: str, pages: dict[Path, _Page]) -> Iterator[str]:
    if urlsplit(address).scheme or _is_remote(address):
        return
    target, anchor = _find_target(page, address), unquote(urlsplit(address).fragment)
    if not target.is_file():
        yield f"the link to {address} leads nowhere"
    elif target in pages and anchor not in pages[target].anchors:
        yield f"the link to {address} leads to an anchor that does not exist"


def main() -> int:
    """Build the site and print what is wrong with it; return 1 if anything is."""
    copy_pages(ROOT, ROOT / PAGES)
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--clean", "--config-file", CONFIG]
    ran = subprocess.run(command, cwd=ROOT, check=False)
    problems = list(iter_problems(ROOT / SITE)) if not ran.returncode else [f"mkdocs ended with {ran.returncode}"]
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{SITE}/index.html")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
