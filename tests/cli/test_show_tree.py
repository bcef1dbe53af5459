"""show and cat, of snapshots that hold a tree."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import holdfast
from holdfast.trees.outline import MAX_TREE_DEPTH
from tests.cli.runs import Cli


@pytest.fixture
def saved(cli: Cli) -> Cli:
    """A tree with leaves of many kinds."""
    weight = torch.nn.Parameter(torch.arange(40_000.0).reshape(200, 200))
    tree = {
        "model": {"w": weight, "tied": weight.data.t(), "b": torch.zeros(5, dtype=torch.bfloat16)},
        "opt": {"lr": 0.1, "betas": (0.9, 0.999), "name": "AdamW", "empty": {}},
        "sparse": torch.eye(3).to_sparse(),
        "array": np.arange(4),
        "text": "x" * 5000,
    }
    holdfast.open(cli.store).save("run/1", tree, metadata={"epoch": 3})
    return cli


def test_show_lists_leaves_by_name_with_what_they_are(saved: Cli) -> None:
    out = saved.ok("show", "run/1")

    record, leaves, _packs = out.split("\n\n")
    assert [line.split()[0] for line in leaves.splitlines()] == [
        "LEAF", "model.w", "model.tied", "model.b", "opt.lr", "opt.betas.0", "opt.betas.1", "opt.name", "opt.empty",
        "sparse", "indices", "values", "array", "text",
    ]  # fmt: skip
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in leaves.splitlines()}
    assert rows["model.w"] == "float32 (200, 200), parameter, requires grad 156 KiB 156 KiB"
    assert rows["model.tied"] == "float32 (200, 200), strides (1, 200), shares memory with model.w 156 KiB 0 B"
    assert rows["opt.lr"] == "0.1 - -"
    assert rows["opt.name"] == "'AdamW' - -"
    assert rows["opt.empty"] == "{} - -"
    assert rows["sparse"] == "sparse_coo float32 (3, 3) 60 B 60 B"
    assert rows["indices"] == "int64 (2, 3) 48 B 48 B"
    assert rows["array"] == "array <i8 (4,) 32 B 32 B"
    assert rows["text"] == "str 4.9 KiB 4.9 KiB"
    assert "meta epoch" in record


def test_the_environment_is_in_the_header(saved: Cli) -> None:
    (line,) = [line for line in saved.ok("show", "run/1").splitlines() if line.startswith("environment")]

    for word in ("host ", "python 3.", f"torch {torch.__version__}", "world size 1"):
        assert word in line
    assert saved("show", "run/1", "--json").json["environment"]["world_size"] == 1


def test_show_as_json_has_the_leaves(saved: Cli) -> None:
    leaves = {leaf["name"]: leaf for leaf in saved("show", "run/1", "--json").json["leaves"]}

    assert leaves["model.w"] == {
        "name": "model.w",
        "path": ["model", "w"],
        "kind": "tensor",
        "dtype": "float32",
        "shape": [200, 200],
        "bytes": 160_000,
        "text": None,
        "entries": ["model.w"],
    }
    assert leaves["opt.betas.1"]["text"] == "0.999"
    assert leaves["sparse"]["entries"] == ["sparse.indices", "sparse.values"]


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        ("opt.lr", ["opt.lr"]),
        ("opt.betas", ["opt.betas.0", "opt.betas.1"]),
        ("model", ["model.w", "model.tied", "model.b"]),
    ],
)
def test_show_shows_one_leaf_or_what_is_below_a_name(saved: Cli, name: str, leaves: list[str]) -> None:
    lines = saved.ok("show", "run/1", name).split("\n\n")[0].splitlines()

    assert [line.split()[0] for line in lines] == ["LEAF", *leaves]
    assert [leaf["name"] for leaf in saved("show", "run/1", name, "--json").json["leaves"]] == leaves


def test_show_lists_the_chunks_of_one_leaf(saved: Cli) -> None:
    chunks = saved.ok("show", "run/1", "model.w", "--chunks").split("\n\n")[1].splitlines()

    assert [line.split()[:3] for line in chunks[1:]] == [["model.w", "0", "160000"]]


def test_show_shows_one_file(cli: Cli) -> None:
    cli.ok("put", "files", "data")

    one, below = cli.ok("show", "files", "data/config.json"), cli.ok("show", "files", "data/sub")

    assert [line.split()[0] for line in one.splitlines()] == ["ENTRY", "data/config.json"]
    assert [line.split()[0] for line in below.splitlines()] == ["ENTRY", "data/sub/run.sh"]


@pytest.mark.parametrize(
    ("name", "hint"), [("model.ww", "did you mean 'model.w'"), ("qqqq", "`holdfast show run/1` lists them")]
)
def test_a_missing_leaf_suggests_close_ones(saved: Cli, name: str, hint: str) -> None:
    ran = saved("show", "run/1", name)

    assert (ran.code, ran.out) == (2, "")
    assert f"no leaf {name!r} in 'run/1'; {hint}" in ran.err


def test_cat_writes_the_bytes_of_a_leaf(saved: Cli) -> None:
    assert saved.ok("cat", "run/1", "text") == "x" * 5000


def test_show_loads_neither_torch_nor_numpy(saved: Cli) -> None:
    program = (
        "import sys; from holdfast.cli.main import main; code = main();"
        " sys.stderr.write(' '.join({'torch', 'numpy', 'rich', 'concurrent.futures'} & sys.modules.keys()))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, "-s", str(saved.store), "show", "run/1"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stderr == ""


def test_show_and_diff_print_the_deepest_leaf(cli: Cli) -> None:
    store = holdfast.open(cli.store)
    for name, value in (("a", 1.0), ("b", 2.0)):
        tree: object = torch.full([3], value)
        for _ in range(MAX_TREE_DEPTH):
            tree = {"a": tree}
        store.save(name, tree)

    leaf = ".".join("a" * MAX_TREE_DEPTH)

    assert leaf in cli.ok("show", "a")
    assert leaf in cli.ok("show", "a", leaf)
    assert f"~ {leaf}" in cli("diff", "a", "b", "--values").out


def test_repeated_layers_and_rng_state_are_folded_unless_every_leaf_is_asked_for(empty: Cli) -> None:
    layers = {str(number): {"weight": torch.ones(64, 8)} for number in range(4)}
    tree = {"model": {"layers": layers}, "rng": holdfast.RngState(), "step": 1}
    holdfast.open(empty.store).save("run/1", tree)

    folded, full, below = (empty.ok("show", "run/1", *words) for words in ([], ["--all"], ["rng"]))

    assert re.search(r"^model\.layers\.#\.weight +4 x float32 \(64, 8\) +8\.0 KiB", folded, re.MULTILINE)
    assert re.search(r"^rng +RNG state, 11 values +", folded, re.MULTILINE)
    assert "16 leaves in 3 lines; --all lists each" in folded
    assert "rng.python.words" not in folded
    for text in ("model.layers.3.weight ", "rng.python.words ", "step "):
        assert text in full
    assert "--all" not in full
    assert "rng.python.words " in below


def test_folded_sizes_add_up_to_those_of_every_leaf(empty: Cli) -> None:
    layers = {str(number): torch.full((64, number // 2 + 1), float(number)) for number in range(6)}
    holdfast.open(empty.store).save("run/1", {"layers": layers, "last": torch.zeros(100)})

    counts = [
        sum(int(size) for size in re.findall(r" (\d+) B +\d+ B$", empty.ok("show", "run/1", *words), re.MULTILINE))
        for words in ([], ["--all"])
    ]

    # Sizes below 1000 bytes are printed in full.
    assert counts[1] == 2 * (256 + 512 + 768) + 400
    assert counts[0] == counts[1]
