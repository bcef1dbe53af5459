"""Values other than tensors through `dcp.save` and `dcp.load`: the loaded values, and which saves warn."""

from __future__ import annotations

import collections
import datetime
import io
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.dcp
from holdfast.dcp import StorageReader, StorageWriter
from holdfast.snapshot.pickled import dump_payload, find_refusal, load_payload
from tests.distributed.dcp_states import dcp
from tests.kit.dcp_calls import ALONE
from tests.kit.hooking import Hook

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = torch.serialization.get_safe_globals()
    yield
    holdfast.dcp.uninstall()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


def make_stream() -> io.BytesIO:
    stream = io.BytesIO(b"some bytes")
    stream.seek(4)
    return stream


def test_a_stream_of_bytes_comes_back_as_one(tmp_path: Path) -> None:
    state = {"stream": make_stream(), "nested": {"streams": [io.BytesIO(), make_stream()]}}
    loaded: dict[str, Any] = {"stream": None, "nested": {"streams": None}}
    with holdfast.dcp.install():
        dcp.save(state, checkpoint_id=tmp_path / "a", **ALONE)
        dcp.load(loaded, checkpoint_id=tmp_path / "a", **ALONE)
        stored = holdfast.open(tmp_path / ".holdfast").load("a")

    for found in (loaded, stored):
        streams = [found["stream"], *found["nested"]["streams"]]
        assert [type(each) for each in streams] == [io.BytesIO] * 3
        assert [(each.getvalue(), each.tell()) for each in streams] == [
            (b"some bytes", 4),
            (b"", 0),
            (b"some bytes", 4),
        ]
    assert io.BytesIO not in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("value", [b"", b"some", [b"", io.BytesIO(b"")]])
def test_bytes_load_whether_there_are_any_or_not(value: Any) -> None:
    payload = dump_payload(value)

    assert find_refusal(payload) == ""
    assert repr(load_payload(payload, what="x", weights_only=True))[:4] == repr(value)[:4]
    assert io.BytesIO not in torch.serialization.get_safe_globals()


def test_a_call_of_bytes_cannot_take_memory() -> None:
    class Large:
        def __reduce__(self) -> Any:
            return bytes, (1 << 40,)

    with pytest.raises(holdfast.Unsupported):
        load_payload(dump_payload([io.BytesIO(), Large()]), what="x", weights_only=True)


def test_what_the_user_has_allowed_stays_allowed(tmp_path: Path) -> None:
    torch.serialization.add_safe_globals([io.BytesIO])
    load_payload(dump_payload(make_stream()), what="x", weights_only=True)

    assert io.BytesIO in torch.serialization.get_safe_globals()


@pytest.fixture
def _fast_switches() -> Iterator[None]:
    """Let threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_fast_switches")
def test_streams_can_be_loaded_by_many_threads_at_once() -> None:
    payload, start, faults = dump_payload(make_stream()), threading.Barrier(4), list[BaseException]()

    def load() -> None:
        start.wait()
        try:
            for _ in range(50):
                load_payload(payload, what="x", weights_only=True)
        except holdfast.Unsupported as error:
            faults.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert faults == []


def test_what_a_load_refuses_is_announced_by_the_save(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "when": datetime.timedelta(1), "deep": {"odd": pytest.approx}, "step": 3}
    with holdfast.dcp.install():
        with pytest.warns(UserWarning, match=r"deep\.odd.*holdfast\.dcp\.install\(weights_only=False\)") as outcome:
            dcp.save(state, checkpoint_id=tmp_path / "a", **ALONE)
        with pytest.raises(CheckpointException, match=r"Refused: (_pytest\.approx\.approx|datetime\.timedelta)"):
            dcp.load(
                {"w": torch.ones(3), "when": None, "step": 0, "deep": {"odd": None}},
                checkpoint_id=tmp_path / "a",
                **ALONE,
            )

    texts = [str(each.message) for each in outcome if "weights_only" in str(each.message)]
    assert len(texts) == 1
    assert "when (datetime.timedelta)" in texts[0]
    assert "step" not in texts[0].replace("timestep", "")


def test_who_allows_everything_is_not_warned(tmp_path: Path) -> None:
    state, loaded = {"odd": pytest.approx}, {"odd": None}
    with holdfast.dcp.install(weights_only=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        dcp.save(state, checkpoint_id=tmp_path / "a", **ALONE)
        dcp.load(loaded, checkpoint_id=tmp_path / "a", **ALONE)
        writer = StorageWriter(tmp_path / "s", "b", weights_only=False)
        dcp.save(state, storage_writer=writer, **ALONE)

    assert loaded == state


def test_the_storage_writer_warns_too(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"odd .*StorageReader\(\.\.\., weights_only=False\)"):
        dcp.save({"odd": pytest.approx}, storage_writer=StorageWriter(tmp_path / "s", "a"), **ALONE)


VALUES: dict[str, Any] = {
    "none": None,
    "numbers": [1, 2.5, -(1 << 80), 1j, True],
    "text": "c__main__\nThing\n",
    "empty": b"",
    "bytes": b"c__main__\nThing\n\x00\xff",
    "ordered": collections.OrderedDict(a=1),
    "tuple": (1, (2,), torch.ones(2)),
    "size": torch.Size([1, 2]),
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "set": {1, 2},
    "frozenset": frozenset({1}),
    "deque": collections.deque([1]),
    "counter": collections.Counter("aab"),
    "default": collections.defaultdict(int, a=1),
    "stream": io.BytesIO(b"x"),
    "path": Path("a"),
    "when": datetime.datetime(2020, 1, 1),
    "function": print,
    "range": range(3),
    "slice": slice(1, 2),
    "namespace": torch.nn.Linear,
}


@pytest.mark.parametrize("name", VALUES)
def test_the_warning_tells_exactly_what_the_reader_does(name: str, tmp_path: Path) -> None:
    payload = dump_payload(VALUES[name])
    refusal = find_refusal(payload)

    try:
        load_payload(payload, what="x", weights_only=True)
    except holdfast.Unsupported:
        assert refusal != ""
    else:
        assert refusal == ""


def test_a_long_list_of_numbers_is_not_loaded_to_find_that_out(hook: Hook) -> None:
    payload = dump_payload({"numbers": list(range(10_000)), "text": ["a", "b"]})
    hook.forbid(torch, "load")

    assert find_refusal(payload) == ""


@pytest.mark.parametrize("at", ["by name", "by position"])
def test_extensions_are_refused_however_they_are_given(at: str, tmp_path: Path) -> None:
    by_name = {"_extensions": [object()]} if at == "by name" else {}
    by_position = () if by_name else (True, True, 1, 10, False, True, [object()])
    with holdfast.dcp.install(), pytest.raises(holdfast.Unsupported, match="extensions"):
        dcp.FileSystemWriter(tmp_path, *by_position, **by_name)


def test_a_stream_may_change_once_it_was_staged(tmp_path: Path) -> None:
    stream = make_stream()
    state = {"stream": stream, "nested": {"streams": [stream, (stream, 3)]}}
    staged = StorageWriter(tmp_path / "s", "a").stage(state)
    stream.truncate(2)

    assert state["stream"] is stream
    copies = [staged["stream"], staged["nested"]["streams"][0], staged["nested"]["streams"][1][0]]
    assert [(each.getvalue(), each.tell()) for each in copies] == [(b"some bytes", 4)] * 3
    assert staged["nested"]["streams"][1][1] == 3


def test_a_fake_target_is_loaded_without_reading(tmp_path: Path) -> None:
    saved = {"w": torch.arange(6000.0), "cast": torch.ones(4000), "step": 3}
    dcp.save(saved, storage_writer=StorageWriter(tmp_path / "s", "a"), **ALONE)
    store = holdfast.open(tmp_path / "s")
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target: dict[str, Any] = {"w": torch.zeros(6000), "cast": torch.zeros(4000, dtype=torch.float64), "step": 0}
        dcp.load(target, storage_reader=StorageReader(store, "a"), **ALONE)

    # The payload of the number is all that was read.
    assert 0 < store.statistics().stages["read"].size_bytes < 2000
    assert isinstance(target["w"], FakeTensor)
    assert (target["w"].shape, target["cast"].dtype, target["step"]) == ((6000,), torch.float64, 3)


def test_a_tensor_without_items_is_no_reason_to_warn(tmp_path: Path) -> None:
    state = {"empty": torch.empty(0, 3), "w": torch.ones(2)}
    with holdfast.dcp.install(), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        dcp.save(state, checkpoint_id=tmp_path / "a", **ALONE)
        dcp.load(state, checkpoint_id=tmp_path / "a", **ALONE)
        with pytest.raises(CheckpointException, match="not requested by any rank: w"):
            dcp.load({"empty": torch.empty(0, 3)}, checkpoint_id=tmp_path / "a", **ALONE)


def test_a_stream_takes_the_place_of_another(tmp_path: Path) -> None:
    dcp.save({"stream": make_stream()}, storage_writer=StorageWriter(tmp_path / "s", "a"), **ALONE)
    loaded: dict[str, Any] = {"stream": io.BytesIO(b"old")}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "s", "a"), **ALONE)

    assert loaded["stream"].getvalue() == b"some bytes"
