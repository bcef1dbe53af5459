"""An import is an ordinary snapshot: equal to a save from memory, bit for bit, with a receipt for every tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.errors import BadName, Mismatch, NameInUse, SourceChanged, Unsupported, Untrusted
from holdfast.formats import importing
from holdfast.formats.importing import read_import_receipt
from holdfast.formats.reading.byte_ranges import FileBytes
from holdfast.repo.upkeep.transfer import copy_snapshot
from tests.kit.checkpoints import assert_receipt_fits, assert_same, digest_raw, make_state, save_dcp


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    return holdfast.open(tmp_path / "store")


def _make_tree() -> dict[str, Any]:
    """Return a nested state with ties, views, strides, gaps and plain values."""
    base = torch.randn(600, 700, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Linear(20, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 20)).sum().backward()
    optimizer.step()
    views = [base, base, base[10:20], base.t(), base[:, ::2], base[:1].expand(4, 700)]
    values = (1, 2.5, None, b"abc", "x" * 5000, {3: "three"})
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": views,
        "parameter": model.weight,
        "values": values,
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_save_comes_back_as_it_was_saved(store: holdfast.Store, tmp_path: Path, zipped: bool) -> None:
    tree = _make_tree()
    torch.save(tree, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)

    done = store.import_(tmp_path / "a.pt", "a")

    loaded = store.load("a")
    assert_same(loaded, tree)
    views = loaded["views"]
    assert views[0] is views[1]
    assert views[3].data_ptr() == views[4].data_ptr() == views[5].data_ptr() == views[0].data_ptr()
    assert vars(loaded["model"])["_metadata"] == vars(tree["model"])["_metadata"]
    by_name = {f"views.{number}": view for number, view in enumerate(tree["views"])}
    assert {each.name: each.result.digest for each in done.receipt.tensors if each.name in by_name} == {
        name: digest_raw(view) for name, view in by_name.items()
    }


def test_a_save_of_the_same_tensors_from_memory_is_the_same_snapshot(store: holdfast.Store, tmp_path: Path) -> None:
    tree = _make_tree()
    torch.save(tree, tmp_path / "a.pt")
    done = store.import_(tmp_path / "a.pt", "a")

    saved = store.save("b", tree)

    assert saved.digest == done.saved.digest == done.receipt.root
    assert saved.reused_bytes > 0.9 * saved.logical_bytes


def test_the_receipt_has_the_digest_of_every_tensor_and_stays_in_the_store(
    store: holdfast.Store, tmp_path: Path
) -> None:
    state = make_state()
    save_file(state, tmp_path / "m.safetensors", metadata={"format": "pt"})

    done = store.import_(tmp_path / "m.safetensors", "m")

    assert_receipt_fits(done.receipt, state)
    assert {each.file for each in done.receipt.tensors} == {"m.safetensors"}
    stored = read_import_receipt(store.repository, store.snapshot("m").record)
    assert (stored.tensors, stored.root, stored.place) == (done.receipt.tensors, done.receipt.root, done.receipt.place)
    assert store.snapshot("m").metadata == {"safetensors": {"format": "pt"}}
    assert_same(store.load("m"), {name: state[name] for name in store.load("m")})


def test_importing_again_writes_nothing_and_gives_the_same_receipt(store: holdfast.Store, tmp_path: Path) -> None:
    save_file(make_state(), tmp_path / "m.safetensors")
    first = store.import_(tmp_path / "m.safetensors", "m")

    again = store.import_(tmp_path / "m.safetensors", "m")

    assert again.saved.existed
    assert again.receipt.tensors == first.receipt.tensors


def test_a_name_with_other_content_is_kept_unless_told_to_overwrite(store: holdfast.Store, tmp_path: Path) -> None:
    store.save("m", {"x": 1})
    save_file(make_state(), tmp_path / "m.safetensors")

    with pytest.raises(NameInUse):
        store.import_(tmp_path / "m.safetensors", "m")

    assert store.load("m") == {"x": 1}
    store.import_(tmp_path / "m.safetensors", "m", overwrite=True)
    assert store.load("m").keys() == make_state().keys()


def test_a_model_loads_what_was_imported(store: holdfast.Store, tmp_path: Path) -> None:
    model, other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    save_file({f"module.{name}": value for name, value in model.state_dict().items()}, tmp_path / "m.safetensors")

    done = store.import_(tmp_path / "m.safetensors", "m", rename={"module.": ""})
    store.load_into("m", other)

    assert torch.equal(other.weight, model.weight)
    assert {(each.name, each.name_in_files) for each in done.receipt.tensors} == {
        ("weight", "module.weight"),
        ("bias", "module.bias"),
    }


def test_renames_that_would_make_two_names_equal_are_refused(store: holdfast.Store, tmp_path: Path) -> None:
    save_file({"a.x": torch.ones(1), "b.x": torch.ones(1)}, tmp_path / "m.safetensors")

    with pytest.raises(Mismatch, match=r"would both become"):
        store.import_(tmp_path / "m.safetensors", "m", rename={"a.": "", "b.": ""})

    assert store.snapshots() == []


def test_a_cast_is_stated_with_its_largest_error(store: holdfast.Store, tmp_path: Path) -> None:
    wide = torch.tensor([1.0, 1.001, 1e5, float("inf"), float("nan"), 0.0])
    state = {"wide": wide, "large": torch.randn(1000, 900), "count": torch.arange(5)}
    save_file(state, tmp_path / "m.safetensors")

    done = store.import_(tmp_path / "m.safetensors", "m", dtype=torch.float16)

    loaded = store.load("m")
    assert torch.equal(loaded["large"], state["large"].half())
    assert torch.equal(loaded["count"], state["count"])
    facts = {each.name: each for each in done.receipt.tensors}
    assert facts["count"].cast is None
    cast = facts["wide"].cast
    assert cast is not None
    exact = (wide[:2].half().double() - wide[:2].double()).abs()
    assert (cast.num_overflowed, cast.max_abs) == (1, float(exact.max()))
    assert cast.max_rel == float((exact / wide[:2].double()).max())
    large = facts["large"]
    assert large.source.digest == digest_raw(state["large"])
    assert large.result.digest == digest_raw(loaded["large"])
    errors = (state["large"].double() - state["large"].half().double()).abs()
    assert large.cast is not None
    assert large.cast.max_abs == float(errors.max())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_tensor_with_two_names_is_read_once(
    store: holdfast.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    weight, other = torch.randn(1000, 700), torch.randn(40, 50)
    state = {"embed": weight, "other": other, "head": weight.view(1000, 700), "turned": weight.t()}
    torch.save(state, tmp_path / "a.pt")
    read: list[int] = []
    original = FileBytes.read

    def count(self: FileBytes, start: int, stop: int) -> memoryview:
        read.append(stop - start)
        return original(self, start, stop)

    monkeypatch.setattr(FileBytes, "read", count)
    steps: list[int] = []
    done = store.import_(tmp_path / "a.pt", "a", dtype=dtype, progress=lambda update: steps.append(update.done_bytes))

    # The transposed view is read for its digest and for its chunks. Records of the archive take the rest.
    assert 0 <= sum(read) - 3 * weight.nbytes - other.nbytes < 5000
    assert steps[-1] == 3 * weight.to(dtype).nbytes + other.to(dtype).nbytes
    lines = {tensor.name: tensor for tensor in done.receipt.tensors}
    assert {name: line.source.digest for name, line in lines.items()} == {
        name: digest_raw(tensor) for name, tensor in state.items()
    }
    assert {name: line.result.digest for name, line in lines.items()} == {
        name: digest_raw(tensor.to(dtype)) for name, tensor in state.items()
    }
    assert lines["head"].name_in_files == "head"
    assert read_import_receipt(store.repository, store.snapshot("a").record).tensors == done.receipt.tensors
    loaded = store.load("a")
    assert loaded["embed"].data_ptr() == loaded["head"].data_ptr() == loaded["turned"].data_ptr()
    assert_same(loaded["head"], weight.to(dtype))


def test_a_cast_keeps_ties_and_views(store: holdfast.Store, tmp_path: Path) -> None:
    base = torch.randn(40, 50)
    torch.save({"a": base, "b": base, "c": base.t(), "d": base[3:5], "e": base[:, ::2]}, tmp_path / "a.pt")

    done = store.import_(tmp_path / "a.pt", "a", dtype=torch.bfloat16)

    loaded = store.load("a")
    half = base.bfloat16()
    assert_same(loaded, {"a": half, "b": half, "c": half.t(), "d": half[3:5], "e": half[:, ::2]})
    assert loaded["a"] is loaded["b"]
    assert loaded["c"].data_ptr() == loaded["a"].data_ptr()
    assert_receipt_fits(done.receipt, loaded)


def test_an_unknown_dtype_is_refused(store: holdfast.Store, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")

    with pytest.raises(Unsupported, match=r"torch.int8 is no dtype to cast to"):
        store.import_(tmp_path / "m.safetensors", "m", dtype=torch.int8)


def test_a_file_with_other_objects_is_unpickled_only_if_told(store: holdfast.Store, tmp_path: Path) -> None:
    weight = torch.randn(30, 30)
    tree = {"w": weight, "path": {"kind": complex(1, 2)}, "slice": slice(1, 2)}
    torch.save(tree, tmp_path / "a.pt")

    with pytest.raises(Untrusted, match=r"contains 'builtins.slice'"):
        store.import_(tmp_path / "a.pt", "a")
    assert store.snapshots() == []

    done = store.import_(tmp_path / "a.pt", "a", unpickle=True)
    assert_same(store.load("a"), tree)
    assert_receipt_fits(done.receipt, {"w": weight})
    assert store.verify_import(tmp_path / "a.pt", "a", unpickle=True) == []


def test_a_folder_that_contains_the_store_is_refused(store: holdfast.Store, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    store.save("x", 1)

    with pytest.raises(BadName, match="or contains it"):
        store.import_(tmp_path, "m")


def test_a_file_that_shrinks_meanwhile_raises_and_commits_nothing(
    store: holdfast.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    save_file(make_state(), path)
    read = importing.ImportedTensor.read

    def truncate(self: importing.ImportedTensor, start: int, stop: int) -> memoryview:
        path.write_bytes(path.read_bytes()[:-100])
        return read(self, start, stop)

    monkeypatch.setattr(importing.ImportedTensor, "read", truncate)

    with pytest.raises(SourceChanged, match=r"m\.safetensors changed"):
        store.import_(path, "m")
    assert store.snapshots() == []


def test_a_copy_in_another_store_keeps_the_receipt(store: holdfast.Store, tmp_path: Path) -> None:
    save_file(make_state(), tmp_path / "m.safetensors")
    done = store.import_(tmp_path / "m.safetensors", "m")
    other = holdfast.open(tmp_path / "other")
    other.save("x", 1)

    copy_snapshot(store.repository, store.snapshot("m").record, other.repository)

    found = read_import_receipt(other.repository, other.snapshot("m").record)
    assert (found.tensors, found.root) == (done.receipt.tensors, done.receipt.root)
    assert other.verify_import(tmp_path / "m.safetensors", "m") == []


def test_progress_counts_every_byte(store: holdfast.Store, tmp_path: Path) -> None:
    class Count:
        total = done = 0

        def begin(self, task: str, total_bytes: int) -> None:
            self.total = total_bytes

        def advance(self, num_bytes: int) -> None:
            self.done += num_bytes

        def end(self) -> None:
            pass

    progress = Count()
    save_dcp({"state": make_state()}, tmp_path / "dcp")

    done = store.import_(tmp_path / "dcp", "m", progress=progress)

    assert progress.done == progress.total == done.saved.logical_bytes


# The peak of this process alone: `getrusage` would report the peak of its parent, if that is larger.
_MEMORY = """
import re, sys, holdfast
store = holdfast.open(sys.argv[2], budget_bytes=32 << 20)
import torch, holdfast.formats.importing, holdfast.distributed.checkpoint.checkpoint

def read(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

store.save("warm", {"x": torch.ones(1 << 20)})
open("/proc/self/clear_refs", "w").write("5")
before = read("VmRSS")
store.import_(sys.argv[1], "m")
print((read("VmHWM") - before) >> 10)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_memory_stays_bounded_whatever_the_size_of_the_file(tmp_path: Path, kind: str) -> None:
    state = {"a": torch.randn(40 << 20), "b": torch.randn(1 << 12, 9 << 10)}
    path = tmp_path / "checkpoint"
    writers: dict[str, Any] = {"safetensors": save_file, "torch": torch.save, "dcp": save_dcp}
    writers[kind](state, path)
    del state

    command = [sys.executable, "-c", _MEMORY, str(path), str(tmp_path / "store")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)

    assert int(run.stdout) < 64, "MiB, for 304 MiB of tensors and a budget of 32 MiB"
