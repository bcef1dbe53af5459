"""The verbs `import` and `verify-import`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast.formats.receipt import read_receipt
from tests.cli.runs import Cli, digest_tree
from tests.kit.checkpoints import make_state


@pytest.fixture
def model(cli: Cli) -> Path:
    save_file(make_state(), cli.folder / "model.safetensors")
    return cli.folder / "model.safetensors"


@pytest.mark.usefixtures("model")
def test_import_says_what_was_saved_and_what_was_there(cli: Cli) -> None:
    first = cli.ok("import", "model.safetensors", "m")
    again = cli.ok("import", "model.safetensors", "m")

    assert re.fullmatch(
        r"imported m: 6 tensors, 2\.4 MiB \(2\.4 MiB new, 0 B reused\) from safetensors in \d+\.\d\d s;"
        r" digest [0-9a-f]{12}\n",
        first,
    )
    assert again == "m: 6 tensors, 2.4 MiB; already present, nothing was written\n"


@pytest.mark.usefixtures("model")
def test_import_stores_facts_with_the_snapshot(cli: Cli) -> None:
    cli.ok("import", "model.safetensors", "m", "--meta", "licence=mit", "--meta", "from=a=b")

    shown = cli("show", "m", "--json").json
    assert {key: shown["metadata"][key] for key in ("licence", "from")} == {"licence": "mit", "from": "a=b"}
    assert "--meta 'x' is not of the form KEY=VALUE" in cli("import", "model.safetensors", "n", "--meta", "x").err


@pytest.mark.usefixtures("model")
def test_import_renames_casts_and_writes_the_receipt(cli: Cli) -> None:
    out = cli.ok(
        "import", "model.safetensors", "m", "--rename", "head.=top.", "--dtype", "bfloat16", "--receipt", "r.json"
    )

    receipt = read_receipt("r.json")
    assert "cast 3 tensors to bfloat16: largest relative error 0.00" in out
    assert {each.name for each in receipt.tensors if each.name != each.name_in_files} == {
        "top.scale",
        "top.codes",
        "top.empty",
        "top.mask",
    }


def test_import_carries_the_files_of_a_folder(cli: Cli, model: Path) -> None:
    (cli.folder / "folder").mkdir()
    model.rename(cli.folder / "folder/model.safetensors")
    (cli.folder / "folder/config.json").write_text('{"a": 1}')

    out = cli.ok("import", "folder", "m")

    assert "6 tensors, 1 file" in out
    assert cli.ok("cat", "m", "config.json") == '{"a": 1}'
    assert re.search(r"^config\.json +file +8 B ", cli.ok("show", "m"), re.MULTILINE)


def test_unpickling_is_announced(cli: Cli) -> None:
    torch.save({"a": torch.ones(2), "b": slice(1)}, cli.folder / "a.pt")

    refused = cli("import", "a.pt", "a")
    allowed = cli("import", "a.pt", "a", "--unpickle")

    assert refused.code == 2
    assert "a.pt contains 'builtins.slice'" in refused.err
    assert allowed.code == 0
    assert "unpickling a.pt: this can run any code" in allowed.err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["data/config.json", "m"], "data/config.json is not a checkpoint of a known format"),
        (["data", "m"], "data is not a checkpoint of a known format"),
        (["none", "m"], "none does not exist"),
        (["model.safetensors", "@m"], "names that begin with '@' are Holdfast's own"),
        (["model.safetensors", "m", "--rename", "head"], "--rename 'head' is not of the form OLD=NEW"),
        (["model.safetensors", "m", "--format", "dcp"], "is not of the format dcp"),
    ],
)
@pytest.mark.usefixtures("model")
def test_bad_input_gets_one_sentence_and_changes_nothing(cli: Cli, words: list[str], reason: str) -> None:
    before = digest_tree(cli.store)

    ran = cli("import", *words)

    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("holdfast: ")
    assert ran.err.count("\n") == 1
    assert reason in ran.err
    assert digest_tree(cli.store) == before


@pytest.mark.usefixtures("model")
def test_verify_import_compares_with_the_store_or_a_receipt_alone(cli: Cli) -> None:
    cli.ok("import", "model.safetensors", "m", "--receipt", "r.json")

    against = cli.ok("verify-import", "model.safetensors", "--against", "m")
    alone = cli.bare("verify-import", "model.safetensors", "--receipt", "r.json")
    both = cli.ok("verify-import", "model.safetensors", "--against", "m", "--receipt", "r.json")

    assert against == both == alone.out
    assert against == "compared 6 tensors and 0 files of model.safetensors with the receipt: all equal\n"


def test_verify_import_names_each_difference_and_exits_with_1(cli: Cli, model: Path) -> None:
    cli.ok("import", "model.safetensors", "m")
    save_file({**make_state(), "head.codes": torch.zeros(37, dtype=torch.uint8)}, model)

    ran = cli("verify-import", "model.safetensors", "--against", "m")
    as_json = cli("verify-import", "model.safetensors", "--against", "m", "--json")

    assert (ran.code, as_json.code) == (1, 1)
    assert ran.out.startswith("head.codes: the receipt has uint8 (37,), digest ")
    assert ran.out.endswith("1 difference\n")
    assert [finding["name"] for finding in as_json.json["findings"]] == ["head.codes"]


def test_verify_import_refuses_an_edited_receipt(cli: Cli, model: Path) -> None:
    cli.ok("import", "model.safetensors", "m", "--receipt", "r.json")
    text = Path("r.json").read_text()
    Path("r.json").write_text(text.replace('"snapshot":"m"', '"snapshot":"n"'))

    ran = cli("verify-import", str(model), "--receipt", "r.json")

    assert ran.code == 2
    assert "r.json was changed after it was written" in ran.err


def test_verify_import_needs_something_to_compare_with(cli: Cli, model: Path) -> None:
    ran = cli("verify-import", str(model))

    assert ran.code == 2
    assert "give --against NAME, --receipt FILE, or both" in ran.err
