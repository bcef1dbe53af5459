"""Exports as a whole: receipts, casts, replaced and refused destinations, damage, faults, memory."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.errors import BadName, Corrupt, NameInUse, NotFound, StoreFull
from holdfast.formats.export import FORMATS, ExportOptions, export, parse_shard_size
from holdfast.formats.receipt import read_receipt
from holdfast.objects.local.files import PosixFiles
from tests.kit.exports import assert_proved, damage_packs, make_state
from tests.kit.scripted_files import Scripted


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


def _list(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("format", FORMATS)
def test_the_receipt_is_written_and_returned(store: holdfast.Store, tmp_path: Path, format: str) -> None:
    saved = store.save("a", make_state())

    done = store.export("a", tmp_path / "out", format=format, select="model")

    assert read_receipt(done.receipt_path) == done.receipt
    assert (done.receipt.kind, done.receipt.format, done.receipt.snapshot) == ("export", format, "a")
    assert (done.receipt.root, done.receipt.place) == (saved.digest, str(tmp_path / "out"))
    inside = tmp_path / "out" / "holdfast-receipt.json"
    assert done.receipt_path == str(inside if (tmp_path / "out").is_dir() else tmp_path / "out.receipt.json")
    assert {tensor.name for tensor in done.receipt.tensors} == {f"model.{name}" for name in make_state()["model"]}


def test_the_receipt_can_be_written_elsewhere(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", make_state())

    done = store.export("a", tmp_path / "out.pt", format="torch", receipt=tmp_path / "proof.json")

    assert _list(tmp_path) == ["out.pt", "proof.json", "store"]
    assert read_receipt(str(tmp_path / "proof.json")) == done.receipt


@pytest.mark.parametrize("format", FORMATS)
def test_equal_snapshots_have_equal_digests_in_every_format(store: holdfast.Store, tmp_path: Path, format: str) -> None:
    store.save("a", make_state())

    plain = store.export("a", tmp_path / "plain", select="model").receipt
    other = store.export("a", tmp_path / "other", format=format, select="model").receipt

    assert {each.name: each.source for each in other.tensors} == {each.name: each.source for each in plain.tensors}


@pytest.mark.parametrize("format", FORMATS)
def test_a_cast_is_named_with_its_errors(store: holdfast.Store, tmp_path: Path, format: str) -> None:
    state = make_state()
    store.save("a", state)

    receipt = store.export("a", tmp_path / "out", format=format, select="model", dtype=torch.bfloat16).receipt

    lines = {each.name: each for each in receipt.tensors}
    cast = lines["model.0.weight"]
    assert (cast.source.dtype, cast.result.dtype) == ("float32", "bfloat16")
    exact = state["model"]["0.weight"].double()
    assert cast.cast is not None
    assert cast.cast.max_abs == float((exact - exact.bfloat16().double()).abs().max())
    assert lines["model.count"].cast is None
    assert lines["model.turned"].result.dtype == "bfloat16"


def test_a_cast_file_proves_what_is_in_it(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", make_state())

    done = store.export("a", tmp_path / "out", select="model", dtype=torch.float16)

    assert_proved(done.receipt, load_file(tmp_path / "out"))


@pytest.mark.parametrize("format", FORMATS)
def test_damage_in_the_store_ends_the_export_and_leaves_nothing(
    store: holdfast.Store, tmp_path: Path, format: str
) -> None:
    store.save("a", {"x": torch.randn(300_000)})
    damage_packs(tmp_path / "store")

    with pytest.raises(Corrupt, match="damaged"):
        store.export("a", tmp_path / "out", format=format)

    assert _list(tmp_path) == ["store"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("call", ["write_at", "sync_file", "rename_noreplace"])
def test_a_full_disk_leaves_nothing(store: holdfast.Store, tmp_path: Path, format: str, call: str) -> None:
    def refuse() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.save("a", {"x": torch.randn(2_000_000), "step": 1})

    with pytest.raises(OSError, match="No space left"):
        _export_with(store, tmp_path / "out", format, Scripted(before={call: refuse}))

    assert _list(tmp_path) == ["store"]


def _export_with(store: holdfast.Store, path: Path, format: str, files: PosixFiles) -> None:
    options = ExportOptions(format=format)
    export(store.repository, store.snapshot("a").record, str(path), options, files=files)


class _SmallDisk(PosixFiles):
    """A filesystem with a thousand free bytes."""

    def read_free_bytes(self, path: str) -> int:
        return 1000


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_that_does_not_fit_is_refused_first(store: holdfast.Store, tmp_path: Path, format: str) -> None:
    store.save("a", {"x": torch.randn(1000)})

    with pytest.raises(StoreFull, match=r"the export needs [45][0-9]+ bytes, and .* has 1000 free"):
        _export_with(store, tmp_path / "out", format, _SmallDisk())

    assert _list(tmp_path) == ["store"]


def test_an_older_export_is_kept_unless_it_is_to_be_replaced(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"x": torch.zeros(2)})
    store.save("b", {"x": torch.ones(2)})
    store.export("a", tmp_path / "out")

    with pytest.raises(NameInUse, match="exists already"):
        store.export("b", tmp_path / "out")
    assert load_file(tmp_path / "out")["x"].tolist() == [0, 0]
    store.export("b", tmp_path / "out", replace=True)

    assert load_file(tmp_path / "out")["x"].tolist() == [1, 1]
    assert read_receipt(str(tmp_path / "out.receipt.json")).snapshot == "b"


def test_an_older_receipt_is_not_overwritten(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"x": torch.zeros(2)})
    (tmp_path / "out.receipt.json").write_text("of another file")

    with pytest.raises(NameInUse, match=r"the receipt .* exists already"):
        store.export("a", tmp_path / "out")

    assert _list(tmp_path) == ["out.receipt.json", "store"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_destination_may_be_reached_through_a_link(store: holdfast.Store, tmp_path: Path, format: str) -> None:
    store.save("a", {"x": torch.zeros(2)})
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    store.export("a", tmp_path / "link" / "out", format=format)

    assert store.verify_export(tmp_path / "real" / "out", "a") == []


def test_a_destination_in_the_store_is_refused(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"x": torch.zeros(2)})

    with pytest.raises(BadName, match="is inside the store"):
        store.export("a", tmp_path / "store" / "out")


def test_a_snapshot_without_tensors_is_exported_with_its_values(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"step": 3})

    store.export("a", tmp_path / "out.pt", format="torch")

    assert torch.load(tmp_path / "out.pt", weights_only=True) == {"step": 3}


def test_a_missing_snapshot_is_named(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"x": torch.zeros(2)})

    with pytest.raises(NotFound, match="b"):
        store.export("b", tmp_path / "out")


@pytest.mark.parametrize("choices", [{"dtype": torch.int8}, {"dtype": "half"}, {"max_shard_size": "5 apples"}])
def test_invalid_options_are_refused(store: holdfast.Store, tmp_path: Path, choices: Any) -> None:
    store.save("a", {"x": torch.zeros(2)})

    with pytest.raises((ValueError, TypeError), match=r"dtype|not the size of a file"):
        store.export("a", tmp_path / "out", **choices)


def test_an_unknown_format_is_refused(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("a", {"x": torch.zeros(2)})

    with pytest.raises(ValueError, match="format must be one of safetensors, hf, torch, dcp, not 'gguf'"):
        store.export("a", tmp_path / "out", format="gguf")


@pytest.mark.parametrize(
    ("text", "size"), [(7, 7), ("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("1.5KiB", 1536), ("2 TB", 2 * 10**12)]
)
def test_sizes_of_shards_are_parsed(text: int | str, size: int) -> None:
    assert parse_shard_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5", "-1GB", 0, -5, "1e3GB"])
def test_other_sizes_are_refused(text: int | str) -> None:
    with pytest.raises(BadName, match="is not the size of a file"):
        parse_shard_size(text)


_KILLED = """
import os, signal, sys, holdfast
from holdfast.formats.export import ExportOptions, export
from holdfast.objects.local.files import PosixFiles

class Killed(PosixFiles):
    def sync_file(self, handle):
        os.kill(os.getpid(), signal.SIGKILL)

store = holdfast.open(sys.argv[1])
options = ExportOptions(format=sys.argv[3])
export(store.repository, store.snapshot("a").record, sys.argv[2], options, files=Killed())
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_killed_export_leaves_nothing_that_the_next_one_does_not_remove(
    store: holdfast.Store, tmp_path: Path, format: str
) -> None:
    store.save("a", {"x": torch.randn(1000)})
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "store"), str(tmp_path / "out"), format]

    killed = subprocess.run(command, check=False)

    assert killed.returncode == -signal.SIGKILL
    left = [name for name in _list(tmp_path) if name != "store"]
    assert len(left) == 1
    assert left[0].startswith(".out.holdfast-export-")
    store.export("a", tmp_path / "out", format=format)
    assert not [name for name in _list(tmp_path) if name.startswith(".")]


_MEASURED = """
import resource, sys, holdfast
store = holdfast.open(sys.argv[1], budget_bytes=32 << 20)
store.export("small", sys.argv[2] + "-small", format=sys.argv[3])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store.export("large", sys.argv[2], format=sys.argv[3])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_memory_stays_within_the_budget(store: holdfast.Store, tmp_path: Path, format: str) -> None:
    store.save("large", {"x": torch.randn(48 << 20), "turned": torch.randn(1 << 12, 3 << 10).t()})  # 192 and 48 MiB
    store.save("small", {"x": torch.randn(1 << 10)})
    command = [sys.executable, "-c", _MEASURED, str(tmp_path / "store"), str(tmp_path / "out"), format]

    found = subprocess.run(command, check=True, capture_output=True, text=True)

    assert int(found.stdout) < 96, "MiB; a whole tensor takes 192"


@pytest.mark.parametrize("format", ["hf", "dcp"])
def test_what_was_added_to_an_older_export_is_named_and_kept(
    store: holdfast.Store, tmp_path: Path, format: str
) -> None:
    store.save("a", {**make_state(), "config.json": "{}"})
    for _ in range(2):  # the files of an export are no additions to it
        store.export("a", tmp_path / "out", format=format, exclude=["optimizer*"], max_shard_size="9KB", replace=True)
    before = _list(tmp_path / "out")
    (tmp_path / "out" / "logs").mkdir()
    (tmp_path / "out" / "logs" / "run.txt").write_text("days of work")
    (tmp_path / "out" / "tokenizer.json").write_text("{}")

    with pytest.raises(NameInUse, match=r"added since.*: logs/run\.txt, tokenizer\.json; move"):
        store.export("a", tmp_path / "out", format=format, exclude=["optimizer*"], replace=True)

    assert _list(tmp_path / "out") == sorted([*before, "logs", "tokenizer.json"])
    assert _list(tmp_path) == ["out", "store"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("place", ["packs/r.json", "new.json", "config/r.json", "alias.json"])
def test_a_receipt_in_the_store_is_refused(store: holdfast.Store, tmp_path: Path, format: str, place: str) -> None:
    store.save("a", make_state())
    (tmp_path / "store" / "alias.json").symlink_to(tmp_path / "r.json")

    with pytest.raises(BadName, match="is inside the store"):
        store.export("a", tmp_path / "out", format=format, select="model", receipt=tmp_path / "store" / place)

    assert _list(tmp_path) == ["store"]
    assert not (tmp_path / "store" / place).exists()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("place", ["out", "out/r.json", "out/model.safetensors", "out/.metadata"])
def test_a_receipt_never_replaces_what_it_is_about(
    store: holdfast.Store, tmp_path: Path, format: str, place: str
) -> None:
    store.save("a", make_state())

    with pytest.raises(BadName, match="choose another place for the receipt"):
        store.export("a", tmp_path / "out", format=format, select="model", receipt=tmp_path / place, replace=True)

    assert _list(tmp_path) == ["store"]
