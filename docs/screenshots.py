"""Write pictures of `holdfast serve`, light, dark and narrow: `python docs/screenshots.py FOLDER [VIEW ...]`.

Those in docs/pictures are the light and the dark ones.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module, util
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
# `python docs/screenshots.py` puts docs/ itself on the path, and `import tests` needs what is above it.
if not __package__:
    sys.path[0] = str(ROOT)

from tests.browser.chromium import Browser, find_chromium  # noqa: E402 - the path comes first
from tests.browser.stores import add_sharded, fill_store, make_store  # noqa: E402 - the path comes first

_A: Final = "llama/base/step-400"
_B: Final = "llama/base/step-1200"
_LEAF: Final = "model.layers.3.mlp.down_proj.weight"
_SHARDED: Final = "fsdp/step-200"
_TUNED: Final = "llama/finetune/step-1400"
VIEWS: Final = {
    "snapshots": (
        "#/snapshots",
        "document.querySelectorAll('#timeline path').length > 2 && document.querySelector('.row')",
    ),
    "snapshot": (f"#/snapshot?name={_B}", "document.querySelectorAll('.row').length > 4"),
    "tensor": (
        f"#/tensor?name={_A}&leaf={_LEAF}&other={_B}",
        "['#heat canvas', '#histogram svg', '#values td'].every((place) => document.querySelector(place))",
    ),
    "ranks": (f"#/snapshot?name={_SHARDED}", "document.querySelectorAll('.row').length > 8"),
    "pieces": (
        f"#/tensor?name={_SHARDED}&leaf=model.layers.3.down.weight",
        "['#heat canvas', '#histogram svg', '#piece-map rect'].every((place) => document.querySelector(place))",
    ),
    "movement": (
        "#/movement?filter=llama/base/",
        "document.querySelector('#moves canvas') && !document.querySelector('progress')",
    ),
    "sharing": (
        f"#/sharing?pairs=llama/&with={_TUNED}",
        "['#shared canvas', '#pairs canvas', '.row'].every((place) => document.querySelector(place))",
    ),
    "runs": ("#/runs?a=good&b=bad", "document.querySelector('.row') && document.querySelector('#report')"),
    "run": ("#/run?name=burst&step=1", "document.querySelector('.row') && document.querySelector('#nan-row')"),
    "cache": ("#/cache", "document.querySelector('.row')"),
    "health": ("#/health", "document.querySelector('#verdict-line .pill')"),
    "compare": (
        f"#/compare?a={_A}&b={_B}",
        "document.querySelector('#layers canvas') && !document.querySelector('progress')",
    ),
}
"""By name: the address, and what is true once the view is drawn."""
SIZES: Final = {"light": (1280, 900, "light"), "dark": (1280, 900, "dark"), "narrow": (420, 900, "light")}


def take_pictures(folder: Path, *views: str) -> None:
    """Write a PNG of each view, or of some, in each size and scheme."""
    program = find_chromium()
    if program is None:
        raise SystemExit("this needs Chromium: run `apt-get install chromium` as root")
    if util.find_spec("PIL") is None:
        raise SystemExit("this needs Pillow, which comes with the peers of the benchmarks: make .venv/ready-bench")
    folder.mkdir(parents=True, exist_ok=True)
    image = import_module("PIL.Image")
    with tempfile.TemporaryDirectory() as temporary:
        store = make_store(Path(temporary) / "ckpts")
        add_sharded(store)
        fill_store(store)
        with store.serve() as server, Browser(program, Path(temporary)) as browser:
            browser.visit(server.url)
            base = server.url.partition("#")[0]
            for size, (width, height, scheme) in SIZES.items():
                browser.size(width, height)
                browser.emulate(scheme=scheme)
                for view in views or VIEWS:
                    address, is_drawn = VIEWS[view]
                    browser.visit("about:blank")
                    browser.visit(base + address)
                    browser.wait_for(is_drawn)
                    browser.run("new Promise((done) => setTimeout(done, 400))")
                    path = folder / f"serve-{view}-{size}.png"
                    browser.screenshot(path)
                    # A quarter of the size, and the same to the eye.
                    with image.open(path) as picture:
                        picture.convert("RGB").quantize(128).save(path, optimize=True)
                    print(path, *browser.complaints)


if __name__ == "__main__":
    take_pictures(Path(sys.argv[1]), *sys.argv[2:])
