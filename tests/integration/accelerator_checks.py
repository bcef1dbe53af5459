"""What is promised of tensors on another device than the CPU; `test_accelerator.py` runs this beside a fake one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import content_store
from holdfast.digest import hash_bytes
from holdfast.errors import Mismatch
from holdfast.repo.format.grid import Extent, cut_extent
from holdfast.repo.handle.repository import MIN_BUDGET_BYTES
from holdfast.repo.read.reader import SnapshotReader, WriteObserver
from holdfast.snapshot import entries
from holdfast.store import Store
from holdfast.tensors.device_digest import choice
from holdfast.tensors.device_digest.choice import choose_backend, digest, list_accelerators
from holdfast.trees.apply import move_to_device
from tests.cli.runs import Cli
from tests.integration.accelerator import ACCELERATOR, DEVICE, digest_quickly
from tests.integration.device_tree import (
    CPU,
    OTHERS,
    assert_same_tree,
    devices_of,
    make_tree,
    sharing_of,
    tensors_of,
    to_host,
)
from tests.kit import fake_accelerator
from tests.kit.tensors import assert_same_tensor


@pytest.fixture(autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute digests by a kernel of the fake device, except in tests of the backend that is made of operations."""
    if "by_operations" not in request.fixturenames:
        monkeypatch.setattr(choice, "find_backend", lambda *_: digest_quickly)


@pytest.fixture
def by_operations() -> None:
    """Compute digests by torch's operations on the device."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return holdfast.open(tmp_path / "ckpts")


def test_the_tree_is_what_it_should_be() -> None:
    tree = make_tree(DEVICE)

    assert devices_of(tree)[CPU] == list(OTHERS)
    assert set(devices_of(tree)) == {CPU, DEVICE}
    with pytest.raises((TypeError, RuntimeError)):
        tree["contiguous"].numpy()


def test_a_tree_comes_back_on_the_cpu(store: Store) -> None:
    tree = make_tree(DEVICE)
    store.save("x", tree)

    found = store.load("x")

    assert set(devices_of(found)) == {CPU}
    assert_same_tree(found, tree)
    assert found["tied"][0] is found["tied"][1]
    assert found["mixed"]["step"] == 7


@pytest.mark.parametrize("device", ["saved", DEVICE, fake_accelerator.NAME, f"{fake_accelerator.NAME}:0"], ids=str)
def test_a_tree_comes_back_on_the_device(store: Store, device: torch.device | str) -> None:
    tree = make_tree(DEVICE)
    store.save("x", tree)

    found = store.load("x", device=device)

    assert devices_of(found)[CPU] == (list(OTHERS) if device == "saved" else ["rng.torch"])
    assert set(devices_of(found)) == {CPU, DEVICE}
    assert_same_tree(found, tree)
    assert found["tied"][0] is found["tied"][1]


def test_memory_is_copied_to_the_device_once_for_all_who_share_it(store: Store) -> None:
    base = torch.ones(8, device=DEVICE)
    store.save("x", [base, base[2:], base.view(2, 4), torch.ones(3)])
    ACCELERATOR.log.clear()

    found = store.load("x", device="saved")

    assert [line for line in ACCELERATOR.log if "to" in line.split()] == [f"cpu to {DEVICE}"]
    found[0].fill_(5)
    assert found[2].cpu().tolist() == [[5.0] * 4] * 2


def test_aliases_can_be_given_memory_of_their_own(store: Store) -> None:
    tree = make_tree(DEVICE)
    store.save("x", tree)

    found = store.load("x", device="saved", aliases="fresh")

    assert all(names == [name] for name, names in sharing_of(tensors_of(found)).items())


def test_content_has_the_same_digest_on_every_device(store: Store) -> None:
    tree = make_tree(DEVICE)
    here = store.save("device", tree)
    there = store.save("host", store.load("device"))

    assert here.digest == there.digest
    assert not list(store.diff("device", "host").changes)


@pytest.mark.parametrize("staging", ["full", "budget"])
def test_a_tree_may_change_while_it_is_saved_behind(store: Store, staging: Any) -> None:
    tree = make_tree(DEVICE)
    store.save("before", tree)

    handle = store.save_async("x", tree, staging=staging)
    for tensor in (tree["contiguous"], tree["views"]["base"], tree["large"]):
        tensor.fill_(-1)
    handle.wait()

    assert store.load("x", only="large")["large"].min() > -100
    assert not list(store.diff("before", "x").changes)


def test_tensors_on_the_device_are_filled_in_place(store: Store) -> None:
    tree, target = make_tree(DEVICE), make_tree(DEVICE)
    target["mixed"]["step"] = 0
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in tensors_of(target).items()}
    expanded = tree.pop("expanded"), target.pop("expanded")
    store.save("x", tree)

    found = store.load_into("x", target)

    assert found is target
    assert expanded[0].shape == expanded[1].shape
    assert_same_tree(target, tree)
    assert target["mixed"]["step"] == 7
    for name, tensor in tensors_of(target).items():
        assert before[name][0] is tensor
        assert before[name][1] == tensor.data_ptr()


def test_views_that_do_not_share_items_are_filled_on_the_device(store: Store) -> None:
    saved = torch.arange(12.0).view(3, 4)
    base = torch.zeros(3, 4, device=DEVICE)
    store.save("x", {"even": saved[:, ::2].clone(), "odd": saved[:, 1::2].clone()})

    store.load_into("x", {"even": base[:, ::2], "odd": base[:, 1::2]})

    assert torch.equal(base.cpu(), saved)


def test_views_that_share_items_and_should_differ_are_refused_on_the_device(store: Store) -> None:
    base = torch.zeros(4, device=DEVICE)
    store.save("x", [torch.ones(3), torch.zeros(3)])

    with pytest.raises(Mismatch, match="shares memory with"):
        store.load_into("x", [base[:3], base[1:]])
    assert base.cpu().tolist() == [0.0] * 4


def test_what_was_on_the_cpu_fills_the_device_and_the_other_way_round(store: Store) -> None:
    tree = make_tree(DEVICE)
    del tree["expanded"]
    store.save("device", tree)
    store.save("host", store.load("device"), overwrite=True)
    on_device, on_host = store.load("host", device=DEVICE), store.load("device")
    for tensor in (*tensors_of(on_device).values(), *tensors_of(on_host).values()):
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            tensor.detach().fill_(0)

    store.load_into("host", on_device)
    store.load_into("device", on_host)

    assert_same_tree(on_device, tree)
    assert_same_tree(on_host, tree)


def test_values_are_converted_on_the_device(store: Store) -> None:
    saved = {"w": torch.randn(3, 4), "n": torch.arange(3)}
    store.save("x", saved)
    target = {"w": torch.zeros(3, 4, dtype=torch.bfloat16, device=DEVICE), "n": torch.zeros(3).to(DEVICE)}

    store.load_into("x", target, cast=True)

    assert torch.equal(target["w"].cpu(), saved["w"].bfloat16())
    assert torch.equal(target["n"].cpu(), saved["n"].float())


def make_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_training_goes_on_as_if_it_had_never_stopped(store: Store) -> None:
    model, optimizer = make_model()
    train(model, optimizer, 0)
    store.save("x", {"model": model, "optim": optimizer})
    expected = [train(model, optimizer, seed) for seed in (1, 2)]

    model, optimizer = make_model()
    store.load_into("x", {"model": model, "optim": optimizer})

    assert [train(model, optimizer, seed) for seed in (1, 2)] == expected


def make_hooked_model() -> Any:
    model: Any = make_model()[0]
    model.register_load_state_dict_pre_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("make", [lambda: make_model()[0], make_hooked_model], ids=["plain", "hooked"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_module_stays_on_its_device_whichever_way_it_is_loaded(store: Store, make: Any, assign: bool) -> None:
    saved, target = make(), make()
    store.save("x", saved.cpu())

    store.load_into("x", target, assign=assign)

    assert set(devices_of(target.state_dict())) == {DEVICE}
    assert_same_tree(target.state_dict(), saved.state_dict())


def test_what_is_put_in_place_on_a_device_is_tied_as_it_was(store: Store) -> None:
    tied = torch.nn.Parameter(torch.randn(4))
    base = torch.randn(6)
    store.save("x", {"a": tied, "b": tied, "c": base[:4], "d": base[2:]})
    target = {name: torch.zeros(4, device=DEVICE) for name in "abcd"}

    store.load_into("x", target, assign=True)

    assert set(devices_of(target)) == {DEVICE}
    assert target["a"] is target["b"]
    assert target["c"].untyped_storage()._cdata == target["d"].untyped_storage()._cdata


class Meter:
    """How many bytes were read at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        read_all, read_into = SnapshotReader.read_all, SnapshotReader.read_into

        def meter_all(reader: SnapshotReader, wanted: Any, *, watch: WriteObserver | None = None) -> None:
            self.most = max(self.most, sum(buffer.nbytes for _, buffer in wanted))
            read_all(reader, wanted, watch=watch)

        def meter_into(reader: SnapshotReader, entry: Any, start: int, buffer: memoryview) -> None:
            self.most = max(self.most, buffer.nbytes)
            read_into(reader, entry, start, buffer)

        monkeypatch.setattr(SnapshotReader, "read_all", meter_all)
        monkeypatch.setattr(SnapshotReader, "read_into", meter_into)


@pytest.mark.parametrize("size", [1 << 19, 3 << 20], ids=["small", "large"])
def test_what_goes_to_a_device_takes_no_more_than_the_budget_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    store = holdfast.open(tmp_path / "small", budget_bytes=MIN_BUDGET_BYTES)
    tree = {str(number): torch.full((size,), float(number), device=DEVICE) for number in range((6 << 20) // size)}
    store.save("x", tree)
    target = {name: torch.zeros(size, device=DEVICE) for name in tree}
    meter = Meter(monkeypatch)

    store.load_into("x", target)

    assert 0 < meter.most <= MIN_BUDGET_BYTES // 2
    found = store.load("x", device="saved")
    # A tensor that is larger than the budget is in host memory as a whole.
    assert meter.most <= max(MIN_BUDGET_BYTES // 2, size * 4)
    for number, name in enumerate(tree):
        assert target[name].cpu().eq(number).all()
        assert found[name].cpu().eq(number).all()


def test_gradients_come_back_on_the_device(store: Store) -> None:
    model, optimizer = make_model()
    train(model, optimizer, 0)
    parameter = model.get_parameter("0.weight")
    store.save("x", {"w": parameter}, grads=True)

    found = store.load("x", device="saved")["w"]

    assert found.grad.device == DEVICE
    assert parameter.grad is not None
    assert torch.equal(found.grad.cpu(), parameter.grad.cpu())
    target = torch.nn.Parameter(torch.zeros(8, 4, device=DEVICE))
    store.load_into("x", {"w": target})
    assert target.grad is not None
    assert target.grad.device == DEVICE


def test_tensors_read_one_by_one_share_their_memory_on_the_device(store: Store) -> None:
    tree = make_tree(DEVICE)
    store.save("x", tree)
    snap = store.latest("x")
    assert snap is not None

    found = {name: snap[name].read(device="saved") for name in tensors_of(tree)}

    assert devices_of(found)[CPU] == list(OTHERS)
    assert sharing_of(found) == sharing_of(tensors_of(tree))
    for name, tensor in tensors_of(tree).items():
        assert_same_tensor(to_host(found[name]), to_host(tensor))
    assert torch.equal(snap["contiguous"][1:3], tree["contiguous"][1:3].cpu())


def test_the_content_store_keeps_devices(tmp_path: Path) -> None:
    tree = tensors_of(make_tree(DEVICE))
    writer = content_store.ContentStoreWriter(str(tmp_path / "contents"))
    for name, tensor in tree.items():
        writer.write_tensor(name, tensor)
    writer.close()
    reader = content_store.ContentStoreReader(str(tmp_path / "contents"))

    found = {name: reader.read_tensor(name) for name in tree}

    assert {name: tensor.device for name, tensor in found.items()} == {name: held.device for name, held in tree.items()}
    assert sharing_of(found) == sharing_of(tree)
    for name, tensor in tree.items():
        assert_same_tensor(to_host(found[name]), to_host(tensor))
        assert reader.read_tensor(name, device="cpu").device == CPU
    storage = tree["contiguous"].untyped_storage()
    digest = content_store.hash_storage(storage)
    assert digest == content_store.hash_storage(tree["contiguous"].cpu().untyped_storage())
    assert reader.read_storage(digest).device == DEVICE


@pytest.mark.usefixtures("by_operations")
def test_a_storage_on_the_device_is_hashed_there() -> None:
    host = torch.arange(9000, dtype=torch.int16)
    there = host.to(DEVICE)
    choose_backend(DEVICE)
    ACCELERATOR.bytes_to_host = 0

    found = content_store.hash_storage(there.untyped_storage())

    assert ACCELERATOR.bytes_to_host == 2 * 32
    assert found == content_store.hash_storage(host.untyped_storage()) == hash_bytes(host.numpy().tobytes()).hex()


def test_the_command_line_reads_what_was_on_a_device(
    store: Store, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    tree = make_tree(DEVICE)
    store.save("a", tree)
    tree["contiguous"].add_(1)
    store.save("b", tree)

    run = Cli(tmp_path, capsysbinary)
    shown, differing = run("show", "a"), run("diff", "a", "b", "--values")

    assert (shown.code, differing.code) == (0, 1)
    assert "contiguous" in differing.out
    assert "bf16" not in differing.out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_cast_is_made_where_fewer_bytes_have_to_be_moved(
    store: Store, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    base = torch.randn(3, 4)
    store.save("x", {"base": base, "row": base[1], "n": torch.arange(3)})
    moved: list[int] = []

    def meter(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved.append(memory.nbytes)
        return move_to_device(memory, device)

    monkeypatch.setattr(entries, "move_to_device", meter)
    found = store.load("x", device=DEVICE, dtype=dtype)

    assert moved == [12 * min(4, dtype.itemsize), found["n"].nbytes]
    assert set(devices_of(found)) == {DEVICE}
    assert torch.equal(found["base"].cpu(), base.to(dtype))
    assert torch.equal(found["row"].cpu(), base[1].to(dtype))
    assert found["base"].untyped_storage()._cdata == found["row"].untyped_storage()._cdata
    assert found["n"].dtype == torch.int64


def test_only_what_changed_is_read_into_memory_on_the_device(store: Store) -> None:
    items = (1 << 20) // 4
    tree = {"a": torch.arange(3.0 * items)}
    target = {"a": torch.zeros(3 * items, device=DEVICE)}
    store.save("v/1", tree)
    store.load_into("v/1", target)
    tree["a"][items] += 1
    store.save("v/2", tree)
    before = store.statistics().stages["read"].size_bytes

    store.load_into("v/2", target, since="v/1")

    assert torch.equal(target["a"].cpu(), tree["a"])
    assert 0 < store.statistics().stages["read"].size_bytes - before <= 1 << 20


def test_a_target_on_the_device_is_compared_there_and_not_copied_to_the_host(store: Store) -> None:
    items = (1 << 20) // 4
    tree = {"a": torch.arange(2.0 * items), "b": torch.arange(700, dtype=torch.int16)}
    store.save("v/1", tree)
    # Filled by other code, so that only its bytes tell what it holds; one item differs.
    target = {"a": tree["a"].to(DEVICE), "b": tree["b"].to(DEVICE)}
    target["a"][items] += 1
    choose_backend(DEVICE)
    before = store.statistics().stages["read"].size_bytes if "read" in store.statistics().stages else 0
    ACCELERATOR.bytes_to_host = 0

    store.load_into("v/1", target, since="never saved")

    copied = ACCELERATOR.bytes_to_host
    assert all(torch.equal(target[name].cpu(), tree[name]) for name in tree)
    assert 0 < store.statistics().stages["read"].size_bytes - before <= 1 << 20
    # 32 bytes for each chunk, and what is to be replaced, which is kept until the load is final.
    assert copied < (1 << 20) + 5000


def test_a_target_that_holds_the_snapshot_costs_32_bytes_for_each_chunk_and_32_more(store: Store) -> None:
    tree = {"a": torch.arange(3.0 * (1 << 18)), "b": torch.arange(700, dtype=torch.int16)}
    store.save("v/1", tree)
    target = {name: tensor.to(DEVICE) for name, tensor in tree.items()}
    choose_backend(DEVICE)
    ACCELERATOR.bytes_to_host = 0

    store.load_into("v/1", target, since="never saved")

    chunks = [cut_extent(Extent(0, each.nbytes, each.element_size(), tuple(each.shape))) for each in tree.values()]
    # One more for random bytes that are hashed beside them.
    assert ACCELERATOR.bytes_to_host == 32 * (sum(map(len, chunks)) + 1)


@pytest.mark.usefixtures("by_operations")
def test_digests_are_those_of_the_host_and_take_few_bytes_of_copies() -> None:
    assert choose_backend(DEVICE).backend == "torch"
    host = torch.arange(6000, dtype=torch.int16).view(20, 300)
    there = host.to(DEVICE)
    ACCELERATOR.bytes_to_host = 0

    whole, gappy = digest(there), digest(there.t()[::2])

    # Each of the two calls hashes random bytes besides.
    assert ACCELERATOR.bytes_to_host == 32 * (1 + 1 + 2)
    data = host.numpy().tobytes()
    assert whole == hash_bytes(data)
    assert gappy == hash_bytes(host.t()[::2].contiguous().numpy().tobytes())


@pytest.mark.usefixtures("by_operations")
def test_the_backend_cpu_copies_to_the_host() -> None:
    there = torch.arange(5000, device=DEVICE)
    ACCELERATOR.bytes_to_host = 0

    assert digest(there, backend="cpu") == digest(there)

    assert ACCELERATOR.bytes_to_host == 5000 * 8 + 2 * 32


def test_doctor_says_how_digests_are_computed_on_the_device(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert list_accelerators() == [DEVICE]

    ran = Cli(tmp_path, capsysbinary)("doctor", "--devices")

    expected = f"ok       digests of bytes on {DEVICE} are computed by the backend 'torch': checked against the CPU on"
    assert expected in ran.out
