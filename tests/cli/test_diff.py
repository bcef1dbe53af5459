"""diff: lines, sums, exit codes, and what is loaded."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import holdfast
from tests.cli.runs import Cli, digest_tree


@pytest.fixture
def saved(cli: Cli) -> Cli:
    """Two checkpoints that differ in all the ways that are common, a copy of the first, and some files."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    other = weight.clone()
    other[3, 17] += 0.5
    store = holdfast.open(cli.store)
    store.save("run/1", {"model": {"w": weight, "b": torch.zeros(5), "old": torch.ones(2)}, "lr": 0.1, "step": 1})
    store.save("run/1 again", {"model": {"w": weight, "b": torch.zeros(5), "old": torch.ones(2)}, "lr": 0.1, "step": 1})
    new = {"model": {"w": other, "b": torch.zeros(5).bfloat16(), "new": torch.ones(3)}, "lr": 0.1, "step": 2}
    store.save("run/2", new)
    return cli


def test_diff_prints_a_line_for_each_change_and_a_sum(saved: Cli) -> None:
    ran = saved("diff", "run/1", "run/2")

    assert (ran.code, ran.err) == (1, "")
    assert re.sub(r"[0-9a-f]{12}", "<digest>", ran.out) == (
        "run/1 (<digest>) -> run/2 (<digest>)\n"
        "~ model.w    float32 (64, 64)  values differ\n"
        "~ model.b    bfloat16 (5,)     dtype float32 -> bfloat16\n"
        "- model.old  float32 (2,)\n"
        "+ model.new  float32 (3,)\n"
        "~ step       1 -> 2\n"
        "1 added, 1 removed, 3 changed, 1 equal; 0 B of 16.0 KiB shared\n"
    )


def test_diff_says_by_how_much(saved: Cli) -> None:
    out = saved("diff", "run/1", "run/2", "--values", "--only", "model.*").out

    assert re.search(
        r"^~ model\.w .* values differ  max abs 0\.5 at \(3, 17\)  rel 0\.0\d+  cos 0\.9999\d+  0\.0244 % differ$",
        out,
        re.MULTILINE,
    )
    assert re.search(r"^~ model\.b .* dtype float32 -> bfloat16  values are the same$", out, re.MULTILINE)
    assert out.endswith("\n1 added, 1 removed, 2 changed, 0 equal\n")


def test_equal_snapshots_exit_with_0(saved: Cli) -> None:
    out = saved.ok("diff", "run/1", "run/1 again")

    assert out.splitlines()[1:] == ["equal: the digests are the same (16.0 KiB)"]


def test_a_part_that_is_equal_exits_with_0(saved: Cli) -> None:
    assert saved.ok("diff", "run/1", "run/2", "--only", "lr").endswith("0 added, 0 removed, 0 changed, 1 equal\n")


def test_diff_as_json(saved: Cli) -> None:
    ran = saved("diff", "run/1", "run/2", "--values", "--json")

    assert ran.code == 1
    found = ran.json
    counts = [found[key] for key in ("added", "removed", "changed", "equal", "is_equal")]
    assert counts == [1, 1, 3, 1, False]
    first = found["changes"][0]
    assert (first["name"], first["kind"], first["path"]) == ("model.w", "changed", ["model", "w"])
    assert first["after"] == {"kind": "tensor", "dtype": "float32", "shape": [64, 64], "bytes": 16384, "text": None}
    assert first["aspects"] == [{"what": "values", "before": "", "after": "", "part": ""}]
    assert first["distances"][0]["at"] == [3, 17]
    assert found["changes"][-1]["after"]["text"] == "2"


def test_infinity_is_valid_json(cli: Cli) -> None:
    store = holdfast.open(cli.store)
    store.save("a", {"x": torch.zeros(2)})
    store.save("b", {"x": torch.ones(2)})

    ran = cli("diff", "a", "b", "--values", "--json")

    assert "Infinity" not in ran.out
    assert ran.json["changes"][0]["distances"][0]["relative_l2"] == "inf"


def test_long_lists_are_cut_unless_told(cli: Cli) -> None:
    store = holdfast.open(cli.store)
    store.save("a", {f"k{number}": number for number in range(60)})
    store.save("b", {f"k{number}": -1 for number in range(60)})

    cut, whole = cli("diff", "a", "b").out, cli("diff", "a", "b", "--all").out

    assert cut.splitlines()[51:] == [
        "... and 10 more; --all shows them",
        "0 added, 0 removed, 60 changed, 0 equal; 0 B of 0 B shared",
    ]
    assert len(whole.splitlines()) == 62
    assert len(cli("diff", "a", "b", "--json").json["changes"]) == 60


def test_files_compare_too(cli: Cli) -> None:
    cli.ok("put", "a", "data/")
    (cli.folder / "data/config.json").write_text('{"lr": 2}\n')
    (cli.folder / "data/sub/run.sh").chmod(0o644)
    cli.ok("put", "b", "data/")

    out = cli("diff", "a", "b").out

    assert out.splitlines()[1:] == [
        "~ config.json  file  values differ",
        "~ sub/run.sh   file  executable true -> false",
        "0 added, 0 removed, 2 changed, 1 equal; 2.4 MiB of 2.4 MiB shared",
    ]


def test_tags_and_hostile_names(cli: Cli) -> None:
    store = holdfast.open(cli.store)
    store.save("a", {"\x1b[31mred": 1})
    store.save("b", {"\x1b[31mred": "\x1b]0;title\x07"})
    store.tag("best", "b")

    out = cli("diff", "a", "best").out

    assert "\x1b" not in out
    assert "~ \\x1b[31mred  1 -> '\\x1b]0;title\\x07'" in out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["diff", "run/1", "run/3"], "no snapshot or tag 'run/3'"),
        (["diff", "run/1", "run/2", "--only", "modle.*"], "no leaf of 'run/1' or 'run/2' matches 'modle.*'"),
    ],
)
def test_diff_refuses(saved: Cli, words: list[str], reason: str) -> None:
    ran = saved(*words)

    assert (ran.code, ran.out) == (2, "")
    assert reason in ran.err


def test_a_damaged_manifest_is_an_error_not_a_difference(saved: Cli) -> None:
    for path in (saved.store / "manifests").iterdir():
        path.write_bytes(path.read_bytes()[:-1])

    assert saved("diff", "run/1", "run/2").code == 2


def test_diff_writes_nothing(saved: Cli) -> None:
    before = digest_tree(saved.store)

    saved("diff", "run/1", "run/2", "--values")

    assert digest_tree(saved.store) == before


def test_without_values_neither_torch_nor_numpy_is_loaded(saved: Cli) -> None:
    program = (
        "import sys; from holdfast.cli.main import main; code = main();"
        " sys.stderr.write(' '.join({'torch', 'numpy', 'rich'} & sys.modules.keys())); sys.exit(code)"
    )
    words = ["-s", str(saved.store), "diff", "run/1", "run/2"]

    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (1, "")
