"""Loads under a FakeTensorMode and to the meta device read manifests and no values."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _content_store as pytorch

import holdfast
from holdfast.content_store import ContentStoreReader, ContentStoreWriter
from holdfast.errors import Mismatch, MissingChunk, Unsupported
from tests.kit.capabilities import needs_ability
from tests.kit.tensors import COMPOSITES, ORDINARY, SUBCLASSES


def make_tree() -> dict[str, Any]:
    base = torch.arange(20_000, dtype=torch.float32)
    weight = torch.nn.Parameter(torch.randn(40, 300))
    return {
        "weight": weight,
        "tied": weight,
        "rows": base.view(100, 200)[3:50],
        "items": base[5000:],
        "small": torch.ones(2, 3),
        "packed": torch.randn(4000, 9)[:, 2],
        "conj": torch.randn(5000, dtype=torch.cfloat).conj(),
        "neg": torch._neg_view(torch.randn(5000)),
        "half": torch.zeros(3000, dtype=torch.bfloat16),
        "image": torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "absent": torch.empty(5, device="meta"),
        "step": 7,
        "text": "abc",
        "nested": [{"t": torch.arange(6000)}, (torch.zeros(10, dtype=torch.bool),)],
    }


def describe(value: torch.Tensor) -> tuple[object, ...]:
    place = (value.shape, value.stride(), value.dtype, value.device, value.layout)
    is_parameter = isinstance(value, torch.nn.Parameter)
    return *place, value.requires_grad, value.is_conj(), value.is_neg(), is_parameter


def list_tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(tree) if isinstance(each, torch.Tensor)]


def count_read(store: holdfast.Store) -> int:
    counted = store.statistics()
    return sum(stage.size_bytes for name, stage in counted.stages.items() if name == "read") + counted.mapped_entries


@pytest.fixture
def store(tmp_path: Path) -> holdfast.Store:
    opened = holdfast.open(tmp_path / "s")
    opened.save("a", make_tree())
    return opened


def remove_packs(store: holdfast.Store) -> None:
    shutil.rmtree(Path(store.url) / "packs")


WAYS: dict[str, Callable[[holdfast.Store], Any]] = {
    "load": lambda store: store.load("a"),
    "load fresh": lambda store: store.load("a", aliases="fresh"),
    "load mapped": lambda store: store.load("a", mmap=True),
    "snapshot": lambda store: {name: store.snapshot("a")[name] for name in store.snapshot("a")},
}


@pytest.mark.parametrize("way", ["load", "load fresh", "load mapped"])
def test_a_fake_load_tells_what_a_real_one_gives_and_reads_nothing(store: holdfast.Store, way: str) -> None:
    real = WAYS[way](store)
    again = holdfast.open(store.url)
    with FakeTensorMode():
        fake = WAYS[way](again)

    assert count_read(again) == 0
    assert (fake["step"], fake["text"]) == (7, "abc")
    assert all(isinstance(each, FakeTensor) for each in list_tensors(fake))
    assert [describe(each) for each in list_tensors(fake)] == [describe(each) for each in list_tensors(real)]


def test_a_fake_load_needs_no_packs(store: holdfast.Store) -> None:
    remove_packs(store)
    with FakeTensorMode():
        assert tuple(store.load("a")["weight"].shape) == (40, 300)
    with pytest.raises(MissingChunk):
        store.load("a")


def test_a_fake_load_keeps_what_is_shared(store: holdfast.Store) -> None:
    with FakeTensorMode():
        fake, fresh = store.load("a"), store.load("a", aliases="fresh")

    assert fake["weight"] is fake["tied"]
    assert fake["rows"].untyped_storage()._cdata == fake["items"].untyped_storage()._cdata
    assert fresh["rows"].untyped_storage()._cdata != fresh["items"].untyped_storage()._cdata
    assert fake["half"].untyped_storage()._cdata != fake["items"].untyped_storage()._cdata


def test_fake_tensors_can_be_on_a_device_that_is_not_there(store: holdfast.Store) -> None:
    with FakeTensorMode():
        fake = store.load("a", device="cuda:1", only="weight")

    assert fake["weight"].device == torch.device("cuda:1")


def test_a_fake_load_can_be_cast(store: holdfast.Store) -> None:
    names = ["weight", "packed", "half", "small", "neg", "scalar"]
    real = store.load("a", dtype=torch.float64, only=names)
    again = holdfast.open(store.url)
    with FakeTensorMode():
        fake = again.load("a", dtype=torch.float64, only=names)

    assert count_read(again) == 0
    assert [describe(each) for each in list_tensors(fake)] == [describe(each) for each in list_tensors(real)]


def test_a_model_can_run_on_what_a_fake_load_gives(store: holdfast.Store) -> None:
    with FakeTensorMode():
        weight = store.load("a")["weight"]
        loss = (weight @ torch.ones(300)).sum()
        loss.backward()

    assert tuple(weight.grad.shape) == (40, 300)


def test_a_lazy_tensor_is_read_as_a_fake_one(store: holdfast.Store) -> None:
    snapshot = holdfast.open(store.url).snapshot("a")
    real = {name: value for name, value in make_tree().items() if isinstance(value, torch.Tensor)}
    with FakeTensorMode():
        for name in real:
            assert describe(snapshot[name].read()) == describe(snapshot[name].read(aliases="fresh"))
        part = snapshot["rows"][2:5, ::2]
        cast = snapshot["half"].read(dtype=torch.float32)
        assert snapshot["nested"].load()["0.t"].shape == (6000,)

    assert isinstance(part, FakeTensor)
    assert (part.shape, part.stride(), cast.dtype) == ((3, 100), (100, 1), torch.float32)
    # Real tensors are not mixed up with fake ones that are still in use.
    assert torch.equal(snapshot["rows"].read(), make_tree()["rows"])


def test_lazy_fake_reads_touch_no_packs(store: holdfast.Store) -> None:
    remove_packs(store)
    with FakeTensorMode():
        assert store.snapshot("a")["rows"][2:5].shape == (3, 200)
        assert store.snapshot("a")["weight"].read().shape == (40, 300)


def test_a_load_to_the_meta_device_reads_nothing(store: holdfast.Store) -> None:
    real = store.load("a")
    remove_packs(store)
    meta = store.load("a", device="meta")

    tensors, wanted = list_tensors(meta), list_tensors(real)
    assert count_read(holdfast.open(store.url)) == 0
    assert {each.device.type for each in tensors} == {"meta"}
    assert [describe(each)[:3] + describe(each)[4:] for each in tensors] == [
        describe(each)[:3] + describe(each)[4:] for each in wanted
    ]
    assert meta["rows"].untyped_storage()._cdata == meta["items"].untyped_storage()._cdata
    assert store.snapshot("a")["weight"].read(device="meta").is_meta
    assert store.load("a", device="meta", dtype=torch.float16)["weight"].dtype == torch.float16


@pytest.mark.parametrize("is_module", [False, True])
def test_a_fake_tree_is_filled_with_nothing(tmp_path: Path, is_module: bool) -> None:
    store = holdfast.open(tmp_path / "s")
    model = torch.nn.Linear(300, 40)
    store.save("m", {"model": model if is_module else dict(model.state_dict()), "step": 3})
    remove_packs(store)
    with FakeTensorMode():
        target = torch.nn.Linear(300, 40)
        tree: dict[str, Any] = {"model": target if is_module else dict(target.state_dict()), "step": 0}
        store.load_into("m", tree)
        wrong = {"model": torch.nn.Linear(30, 40), "step": 0}
        with pytest.raises(Mismatch, match=r"shape \(40, 30\) in the target"):
            store.load_into("m", wrong)

    assert tree["step"] == 3
    assert isinstance(target.weight, FakeTensor)


def test_fake_tensors_are_put_in_place_of_others(store: holdfast.Store) -> None:
    with FakeTensorMode():
        tree = {"weight": torch.empty(40, 300)}
        store.load_into("a", tree, assign=True, strict=False)

    assert isinstance(tree["weight"], FakeTensor)


def test_real_and_fake_tensors_are_not_mixed(store: holdfast.Store) -> None:
    real = {"rows": torch.zeros(47, 200)}
    with FakeTensorMode():
        fake = {"rows": torch.zeros(47, 200)}
        with pytest.raises(Mismatch, match="a real tensor, and a FakeTensorMode is active"):
            store.load_into("a", real, strict=False)
    with pytest.raises(Mismatch, match="a fake tensor, which has no memory"):
        store.load_into("a", fake, strict=False)

    assert real["rows"].abs().sum() == 0


@pytest.mark.filterwarnings("ignore")
def test_every_ordinary_tensor_is_faked_and_not_read(tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "s")
    store.save("a", {name: each for name, make in list(ORDINARY.items())[::5] if not (each := make()).is_quantized})
    real = store.load("a")
    again = holdfast.open(store.url)
    with FakeTensorMode() as mode:
        fake = again.load("a")

    assert count_read(again) == 0
    assert {each.fake_mode for each in fake.values()} == {mode}
    assert {name: describe(each) for name, each in fake.items()} == {
        name: describe(each) for name, each in real.items()
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(COMPOSITES)[::7])
def test_a_tensor_made_of_others_is_faked_or_refused_by_name(name: str, tmp_path: Path) -> None:
    store = holdfast.open(tmp_path / "s", types=SUBCLASSES)
    store.save("a", {"t": COMPOSITES[name]()})
    real = store.load("a")["t"]
    with FakeTensorMode() as mode:
        try:
            fake = store.load("a")["t"]
        except Unsupported as error:
            assert "'a', t" in str(error)  # noqa: PT017  # either is right
            assert real.is_quantized or real.is_nested or type(real) in SUBCLASSES
            return
    faked = [each for each in (fake, *vars(fake).values()) if isinstance(each, FakeTensor)]
    assert {each.fake_mode for each in faked} == {mode}
    assert faked
    assert (fake.shape, fake.dtype, fake.layout) == (real.shape, real.dtype, real.layout)


# The content store, against PyTorch's own


def write_both(tmp_path: Path) -> dict[str, torch.Tensor]:
    base = torch.arange(6000, dtype=torch.float32)
    tensors = {
        "base": base,
        "view": base[1000:].view(100, 50),
        "half": torch.ones(700, dtype=torch.half),
        "conj": torch.randn(900, dtype=torch.cfloat).conj(),
    }
    own, theirs = (
        ContentStoreWriter(tmp_path / "own"),
        pytorch.ContentStoreWriter(str(tmp_path / "theirs"), stable_hash=True),
    )
    for name, tensor in tensors.items():
        own.write_tensor(name, tensor)
        theirs.write_tensor(name, tensor)
    own.close()
    return tensors


@needs_ability("load a file as fake tensors of the CPU")
@pytest.mark.parametrize("cache", [True, False])
def test_the_content_store_gives_the_fake_tensors_that_torch_load_gives(tmp_path: Path, cache: bool) -> None:
    tensors = write_both(tmp_path)
    shutil.rmtree(tmp_path / "own" / "packs")
    torch.save(tensors, tmp_path / "all.pt")
    reader = ContentStoreReader(tmp_path / "own", cache=cache)
    with FakeTensorMode():
        found = {name: reader.read_tensor(name) for name in tensors}
        wanted = torch.load(tmp_path / "all.pt")

    for name in tensors:
        assert isinstance(found[name], FakeTensor)
        assert describe(found[name]) == describe(wanted[name])
    is_shared = found["base"].untyped_storage()._cdata == found["view"].untyped_storage()._cdata
    assert is_shared is cache


def test_the_content_store_does_not_mix_fake_and_real(tmp_path: Path) -> None:
    tensors = write_both(tmp_path)
    reader = ContentStoreReader(tmp_path / "own")
    with FakeTensorMode():
        first = reader.read_tensor("base")
    real = reader.read_tensor("base")
    with FakeTensorMode():
        second = reader.read_tensor("base")

    assert torch.equal(real, tensors["base"])
    assert isinstance(first, FakeTensor)
    assert isinstance(second, FakeTensor)
    assert first.fake_mode is not second.fake_mode
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_the_content_store_reads_nothing_to_the_meta_device(tmp_path: Path) -> None:
    tensors = write_both(tmp_path)
    shutil.rmtree(tmp_path / "own" / "packs")
    reader = ContentStoreReader(tmp_path / "own")
    theirs = pytorch.ContentStoreReader(str(tmp_path / "theirs"))

    for name in tensors:
        assert describe(reader.read_tensor(name, device="meta")) == describe(theirs.read_tensor(name, device="meta"))
