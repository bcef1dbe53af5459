"""Who may import whom, and which few files may print, read the environment or import late."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Final

import pytest

from tests.architecture.late_imports import find_unused, is_allowed
from tests.architecture.sources import Import, Source, iter_imports, parse_source, read_sources

# Low to high. A module imports from lower lines and from its own package; names on one line stay apart.
# Every top-level module or folder of the package stands here or in ASIDE: a new one is a decision, made here.
LAYERS: Final = (
    ("errors",),
    ("progress", "digest", "json_text", "low_priority", "lru", "texts"),
    ("display",),
    ("objects",),
    ("repo",),
    ("query",),
    ("tensors", "trees", "files"),
    ("snapshot",),
    ("diff", "content"),
    ("distributed",),
    ("compile_cache", "capture"),
    ("mirror",),
    ("checkpointing", "formats", "series", "serving"),
    ("store",),
    ("compiling", "content_store", "dcp", "integrations"),
    ("cli",),
)
LEVEL: Final = {name: level for level, names in enumerate(LAYERS) for name in names}

# The same rule inside a package: its sub-packages and the modules beside them, low to high. "*" stands for the modules
# beside them that have no line of their own. Names on one line stay apart, but "*" is one room.
ROOMS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "objects": (
        ("at_exit", "blocks", "disk_cache", "request_tally", "storage_options"),
        ("thread_pool",),
        ("together",),
        ("protocol",),
        ("settle", "memory"),
        ("local", "cloud"),
        ("url",),
    ),
    "repo": (
        ("format",),
        ("engine",),
        ("names",),
        ("handle",),
        ("read",),
        ("write",),
        ("files", "upkeep"),
    ),
    "tensors": (("*",), ("device_digest",)),
    "snapshot": (("*",), ("into",), ("slices", "display"), ("lazy",), ("finder",)),
    "distributed": (("talk",), ("checkpoint", "dcp")),
    "compile_cache": (
        ("key_parts",),
        ("code",),
        ("key",),
        ("artifacts",),
        ("inductor",),
        ("bundle",),
        ("*",),
        ("whole",),
    ),
    "formats": (("receipt",), ("digests",), ("reading", "writing"), ("*",)),
    "capture": (("stored",), ("compare",), ("record", "report")),
    "serving": (
        ("answer", "remembered"),
        ("answers",),
        ("routes",),
        ("server",),
    ),
    "cli": (("output", "verb"), ("lookup",), ("verbs",), ("grammar",), ("main",)),
}

# Shipped for people who write stores; sees what they see, and nothing in the package needs it.
ASIDE: Final = {"testing": "repo"}

# `ls`, `check` and `gc` must start fast and run where torch is not wanted. numpy may be used wherever torch may.
WITH_TORCH: Final = {"torch", "numpy"}
TORCH_FREE: Final = frozenset(
    {"", "errors", "progress", "digest", "json_text", "low_priority", "lru", "texts", "display"}
    | {"objects", "repo", "query", "files", "cli", "testing"}
)
# ... but for what exists to make process groups, and XOR of long buffers, by numpy.
TORCH_USERS: Final = {"testing/ranks.py", "repo/format/codec.py"}

# Foreign modules that have one home, or none.
HOME_OF_MODULE: Final[dict[str, set[str]]] = {
    # A bar of a library call is drawn only if the caller asks for it by progress=True.
    "rich": {"cli/output.py", "display/bars.py"},
    "tqdm": {"display/bars.py"},
    # What unpickles or unmarshals runs code from the store.
    "pickle": {"snapshot/pickled.py"},  # for values that the user allows by name, on both sides
    "_pickle": set(),
    "marshal": set(),
    "shelve": set(),
    "dill": set(),
    "cloudpickle": set(),
}

# Names whose use, however they are spelled (`os.environ`, `from os import environ`), has few homes or none.
HOME_OF_NAME: Final[dict[str, set[str]]] = {
    # The secret that compiled graphs are signed with must not stand in a script.
    # Variables set the defaults of torch's compiler, so they are part of a key; kernels of torch read one when loaded.
    "environ": {
        "cli/main.py",
        "compile_cache/artifacts/trust.py",
        "compile_cache/whole/running.py",
        "compile_cache/whole/state.py",
        "objects/cloud/client.py",
    },
    "environb": {"cli/main.py"},
    "getenv": {"cli/main.py"},
    "getenvb": {"cli/main.py"},
    "putenv": set(),
    "unsetenv": set(),
    "expandvars": {"cli/main.py"},
    "print": {"cli/output.py"},
    "eval": set(),
    # Generated code of a compiled callable, which is trusted by its signature or by the owner of the store.
    "exec": {"compile_cache/bundle/generated.py", "compile_cache/whole/running.py"},
    # What others have torch.save write, loaded weights-only unless the user allows more.
    "torch.load": {"snapshot/pickled.py"},
    # A marker is a file of torch.save, because frameworks read it by torch.load.
    "torch.save": {"snapshot/pickled.py", "integrations/marker.py"},
    # Imports by a computed name: the public face loads a name when it is used, and old paths lead to new modules.
    # The compile cache loads what it takes of a version of torch, which others do not have, and modules that code of
    # an operator imports when it runs: their code is part of a key.
    "import_module": {
        "__init__.py",
        "compile_cache/bundle/generated.py",
        "compile_cache/code/digest.py",
        "compile_cache/inductor.py",
        # Classes of well-known libraries, from a list of names that no store can change.
        "trees/registered.py",
    },
    "__import__": set(),
}

# A method may share their name: `model.eval()` is nobody's business here.
BUILTINS: Final = {"print", "eval", "exec", "__import__"}

# Anything in cli/ may hold a stream in its hands; below it nothing may.
STREAMS: Final = {"sys.stdout", "sys.stderr", "sys.stdin"}
# ... but for what sets the exit status, which Python takes from the last flush of standard error.
STREAM_USERS: Final = {"objects/at_exit.py"}


def find_violations(sources: Iterable[Source]) -> list[str]:
    """Return a line for each broken rule: layers, confined modules and names, late imports, cycles."""
    files = list(sources)
    found = [line for source in files for line in _check_source(source)]
    return found + find_cycles(files)


def find_cycles(sources: Iterable[Source]) -> list[str]:
    """Return a line naming the modules of an import cycle, if there is one."""
    by_name = {source.module: source for source in sources}
    graph = {
        name: {target for found in iter_imports(source) if (target := _resolve(found, by_name)) and target != name}
        for name, source in by_name.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return ["import cycle: " + " <- ".join(error.args[1])]
    return []


def _resolve(found: Import, known: Iterable[str]) -> str | None:
    # The public face sets its version before it loads anything.
    names = () if found.full == "holdfast.__version__" else (found.full, found.module)
    return next((name for name in names if name in known), None)


def _check_source(source: Source) -> Iterator[str]:
    if source.unit and source.unit not in LEVEL and source.unit not in ASIDE:
        yield f"{source.path}: {source.unit!r} has no line in the layer table"
        return
    for found in iter_imports(source):
        for reason in _check_import(source, found):
            yield f"{source.path}:{found.line}: {reason}"
    for line, reason in _check_names(source):
        yield f"{source.path}:{line}: {reason}"


def _check_import(source: Source, found: Import) -> Iterator[str]:
    top = found.module.split(".")[0]
    if found.late and not is_allowed(source, found):
        yield f"imports {found.full} inside a function"
    if found.module.startswith("."):
        yield f"imports {found.full} relatively"
    if top in WITH_TORCH and source.unit in TORCH_FREE and source.in_package not in TORCH_USERS:
        yield f"imports {top}, which this layer does without"
    if source.in_package not in HOME_OF_MODULE.get(top, {source.in_package}):
        yield f"imports {top}, {_describe(HOME_OF_MODULE[top])}"
    if top == "holdfast":
        yield from _check_layer(source, found)


def _check_layer(source: Source, found: Import) -> Iterator[str]:
    if source.unit == "":
        if not found.typing_only:
            yield f"the public face loads {found.full} at once"
        return
    target = [*found.full.split("."), ""][1]
    if target == source.unit:
        yield from _check_room(source, found)
        return
    if found.full == "holdfast.__version__":
        return
    if target not in LEVEL and target not in ASIDE:
        yield f"imports {found.full} through the public face instead of the module that owns it"
    elif not _may_import(source.unit, target):
        yield f"{source.unit} imports {target}, which is not below it"


def _may_import(unit: str, target: str) -> bool:
    if target in ASIDE:
        return False
    if unit in ASIDE:
        return LEVEL[target] <= LEVEL[ASIDE[unit]]
    return LEVEL[target] < LEVEL[unit]


def _check_room(source: Source, found: Import) -> Iterator[str]:
    levels = {name: level for level, names in enumerate(ROOMS.get(source.unit, ())) for name in names}
    room, target = source.room, [*found.full.split("."), "", ""][2]
    if not levels or not room or target == room:
        return
    low, high = (levels.get(name, levels.get("*")) for name in (target, room))
    both_beside = target not in levels and room not in levels
    if low is None or high is None:
        yield f"{source.unit}/{target if low is None else room} has no line in the table of rooms"
    elif low >= high and not both_beside:
        yield f"{source.unit}/{room} imports {source.unit}/{target}, which is not below it"


def _check_names(source: Source) -> Iterator[tuple[int, str]]:
    for line, name in _iter_names(source.tree):
        owner, _, short = name.rpartition(".")
        is_method = short in BUILTINS and owner not in ("", "builtins")
        for rule in {name, name if is_method else short} & HOME_OF_NAME.keys():
            if source.in_package not in HOME_OF_NAME[rule]:
                yield line, f"uses {rule}, {_describe(HOME_OF_NAME[rule])}"
        if name in STREAMS and source.unit != "cli" and source.in_package not in STREAM_USERS:
            yield line, f"uses {name}, only code in cli/ talks to a terminal"


def _iter_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield names as they are read: `print`, `os.environ`, and `os.environ` for `from os import environ`."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                yield node.lineno, name
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                yield node.lineno, f"{owner}.{name}"
            case ast.Attribute(value=ast.Attribute(attr=owner), attr=name):
                yield node.lineno, f"{owner}.{name}"
            case ast.ImportFrom(module=str(module), names=names):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in names)


def _describe(homes: set[str]) -> str:
    return f"only {' and '.join(sorted(homes))} may" if homes else "which nothing may"


def test_every_module_keeps_to_its_layer() -> None:
    assert find_violations(read_sources("src/holdfast")) == []


@pytest.mark.parametrize(
    ("path", "code", "reason"),
    [
        ("surprise/__init__.py", "", "no line in the layer table"),
        ("objects/local/local_store.py", "from holdfast.repo.format.pack import read_footer", "objects imports repo"),
        ("objects/local/local_store.py", "from holdfast import repo", "objects imports repo"),
        ("repo/format/pack.py", "from holdfast.repo.names.snapshots import read_tag", "repo/format imports repo/names"),
        ("repo/files.py", "from holdfast.repo.upkeep import check", "repo/files imports repo/upkeep"),
        ("repo/engine.py", "from holdfast.repo.read.reader import Reader", "repo/engine imports repo/read"),
        (
            "tensors/spec.py",
            "from holdfast.tensors.device_digest import pieces",
            "tensors/spec imports tensors/device_digest",
        ),
        ("repo/cellar/wine.py", "from holdfast.repo.format.pack import Pack", "repo/cellar has no line"),
        ("tensors/spec.py", "import holdfast.trees.walk", "tensors imports trees"),
        ("digest.py", "from holdfast.progress import Silent", "digest imports progress"),
        ("cli/main.py", "from holdfast.testing import faults", "cli imports testing"),
        ("testing/ranks.py", "from holdfast.tensors import spec", "testing imports tensors"),
        ("repo/format/pack.py", "from holdfast import NotFound", "through the public face"),
        ("repo/format/pack.py", "import holdfast", "through the public face"),
        ("repo/format/pack.py", "from .layout import key", "relatively"),
        ("__init__.py", "from holdfast.errors import NotFound", "loads holdfast.errors.NotFound at once"),
        ("repo/format/pack.py", "import torch.distributed", "imports torch"),
        ("repo/format/pack.py", "if TYPE_CHECKING:\n    from torch import Tensor", "imports torch"),
        ("testing/faults.py", "import torch", "imports torch"),
        ("repo/format/pack.py", "import numpy as np", "imports numpy"),
        ("cli/verbs/diff.py", "import numpy.typing", "imports numpy"),
        ("cli/commands.py", "from rich.table import Table", "imports rich"),
        ("trees/walk.py", "import pickle", "imports pickle"),
        ("trees/walk.py", "from marshal import loads", "imports marshal"),
        ("trees/walk.py", "eval('1')", "uses eval"),
        ("trees/walk.py", "run = exec", "uses exec"),
        ("trees/walk.py", "import builtins\nbuiltins.eval('1')", "uses eval"),
        ("trees/walk.py", "import torch\ntorch.load('x')", "uses torch.load"),
        ("trees/walk.py", "from torch import load", "uses torch.load"),
        ("objects/local/local_store.py", "import os\nhome = os.environ['HOME']", "uses environ"),
        ("objects/local/local_store.py", "from os import getenv", "uses getenv"),
        ("objects/local/local_store.py", "import os\nhome = os.path.expandvars('$HOME')", "uses expandvars"),
        ("repo/upkeep/check.py", "print('done')", "uses print"),
        ("repo/upkeep/check.py", "import sys\nsys.stderr.write('done')", "uses sys.stderr"),
        ("repo/upkeep/check.py", "def check() -> None:\n    import json", "inside a function"),
        ("cli/verbs/diff.py", "def diff() -> None:\n    from holdfast.diff import facts", "inside a function"),
        ("repo/upkeep/check.py", "from importlib import import_module", "uses import_module"),
    ],
)
def test_a_planted_violation_is_reported(path: str, code: str, reason: str) -> None:
    found = find_violations([parse_source(f"src/holdfast/{path}", code)])

    assert len(found) == 1
    assert reason in found[0]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (
            "repo/format/pack.py",
            "from holdfast.objects.protocol import ObjectStore\nfrom holdfast.repo.format.layout import key",
        ),
        ("repo/format/pack.py", "from holdfast import digest"),
        ("repo/upkeep/check.py", "from holdfast.repo.format.pack import Pack"),
        ("tensors/spec.py", "from holdfast.tensors.spec import find_dtype\nimport numpy\nimport torch"),
        ("testing/faults.py", "from holdfast.repo.write.writer import Writer"),
        ("testing/ranks.py", "import torch.distributed"),
        ("cli/output.py", "import sys\nfrom rich.table import Table\nprint('x', file=sys.stderr)"),
        ("cli/main.py", "import os\nstore = os.environ.get('HOLDFAST_STORE')"),
        ("cli/grammar.py", "def declare() -> None:\n    from holdfast.cli.verbs.check import declare_check"),
        ("__init__.py", "if TYPE_CHECKING:\n    from holdfast.errors import NotFound"),
        ("cli/main.py", "from holdfast import __version__"),
        ("trees/walk.py", "import torch\nfast = torch.compile(model.eval())"),
    ],
)
def test_what_is_allowed_is_not_reported(path: str, code: str) -> None:
    assert find_violations([parse_source(f"src/holdfast/{path}", code)]) == []


def test_every_allowed_late_import_is_used() -> None:
    assert find_unused(read_sources("src/holdfast")) == []


def test_an_allowed_late_import_that_nothing_needs_is_reported() -> None:
    top = parse_source("src/holdfast/cli/output.py", "from rich import progress")
    late = parse_source("src/holdfast/cli/output.py", "def show() -> None:\n    from rich import progress")

    assert "cli/output.py: rich" in find_unused([top])
    assert "cli/output.py: rich" not in find_unused([late])


def test_a_planted_cycle_is_reported() -> None:
    init = parse_source("src/holdfast/repo/__init__.py", "from holdfast.repo.format.pack import Pack")
    pack = parse_source("src/holdfast/repo/format/pack.py", "from holdfast.repo.handle.index import Index")
    through_module = parse_source("src/holdfast/repo/handle/index.py", "from holdfast.repo import pack")
    through_package = parse_source("src/holdfast/repo/handle/index.py", "from holdfast.repo import Pack")
    harmless = parse_source("src/holdfast/repo/handle/index.py", "from holdfast.repo import layout")

    assert len(find_cycles([init, pack, through_module])) == 1
    assert len(find_cycles([init, pack, through_package])) == 1
    assert find_cycles([pack, harmless]) == []


def find_strays(tests: Iterable[str], folders: Collection[str]) -> list[str]:
    """Return the unit tests that stand in a folder that the package does not have."""
    below = (path.removeprefix("tests/unit/").rpartition("/") for path in tests)
    return [f"{folder}/{name}" for folder, _, name in below if folder and folder not in folders]


def test_unit_tests_mirror_the_folders_of_the_package() -> None:
    folders = {source.in_package.rpartition("/")[0] for source in read_sources("src/holdfast")}

    assert find_strays((source.path for source in read_sources("tests/unit")), folders) == []


def test_a_unit_test_in_a_folder_of_its_own_is_reported() -> None:
    tests = ["tests/unit/test_store.py", "tests/unit/repo/format/test_pack.py", "tests/unit/cellar/test_wine.py"]

    assert find_strays(tests, {"repo", "repo/format"}) == ["cellar/test_wine.py"]
