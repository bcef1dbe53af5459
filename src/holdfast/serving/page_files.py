"""The files of the page: HTML, styles, modules of JavaScript; a fixed list, read from the package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

from holdfast.serving.answer import HttpAnswer

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy of every answer: nothing is loaded from elsewhere, and no inline script runs."""
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_REPORT: Final = ("report.css", "cursor.js", "elements.js", "histogram.js", "rows.js", "theme.js")
"""Files that the page shares with the report on two runs."""
_OWN: Final = (
    "serve.css",
    "icon.svg",
    "api.js",
    "cache.js",
    "charts.js",
    "compare.js",
    "errors.js",
    "grid.js",
    "health.js",
    "lineage.js",
    "main.js",
    "movement.js",
    "pairs.js",
    "prune.js",
    "ranks.js",
    "router.js",
    "run.js",
    "runs.js",
    "sharing.js",
    "snapshot.js",
    "snapshots.js",
    "tensor.js",
)


def find_page_file(path: str) -> HttpAnswer | None:
    """Return the file of the page at a path of the server, or None if there is none."""
    name = "index.html" if path == "/" else path.removeprefix("/page/")
    # Compared with a list: no text of a request ever becomes a path.
    if name not in ("index.html", *_REPORT, *_OWN) or path not in ("/", f"/page/{name}"):
        return None
    return HttpAnswer(200, f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8", _read(name))


@cache
def _read(name: str) -> bytes:
    if name == "report.css":
        return (files("holdfast.capture.report") / "page" / "page.css").read_bytes()
    if name in _REPORT:
        return (files("holdfast.capture.report") / "page" / name).read_bytes()
    return (files("holdfast.serving") / "page" / name).read_bytes()
