"""Slices equal those of torch's own indexing, and only their chunks are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.layout import PACKS
from holdfast.store import Store
from tests.kit.loading import noise
from tests.kit.saving import Watched

MIB = 1 << 20


def _shared() -> torch.Tensor:
    return noise(4, 6, 5)


TENSORS = {
    "contiguous": noise(4, 6, 5),
    "transposed": noise(5, 6, 4).permute(2, 1, 0),
    "channels last": noise(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "gappy": noise(8, 6, 7)[::2, :, 1:6],
    "expanded": noise(4, 1, 5).expand(4, 6, 5),
    "expanded outside": noise(6, 5).expand(4, 6, 5),
    "gappy and expanded": noise(8, 1, 7)[::2, :, 1:6].expand(4, 6, 5),
    "unfolded": noise(9).unfold(0, 4, 1),
    "one": noise(1, 6, 1),
    "scalar": noise(1)[0],
    "empty": noise(3, 0, 2),
    "line": noise(40),
    "conjugate": torch.complex(noise(4, 5), noise(4, 5, seed=1)).conj(),
    "negative": torch.complex(noise(4, 5), noise(4, 5, seed=1)).conj().imag,
    "half": noise(4, 5, dtype=torch.bfloat16),
    "bool": noise(4, 5) > 0,
    "view": _shared()[1:3],
    "offset": _shared()[1:, 2:4],
    "parameter": torch.nn.Parameter(noise(4, 5)),
    "quantised": torch.quantize_per_tensor(noise(4, 5), 0.1, 0, torch.qint8),
}


@pytest.fixture(scope="module")
def lazy() -> dict[str, Any]:
    store = Store(MemoryStore())
    tied = {"base": noise(4, 6, 5)}
    store.save("x", {**TENSORS, "base": tied["base"], "alias": tied["base"][1:3]})
    snap = store.snapshot("x")
    return {name: snap[name] for name in snap}


def _slices(size: int) -> st.SearchStrategy[slice]:
    bound = st.none() | st.integers(-size - 2, size + 2)
    return st.builds(slice, bound, bound, st.none() | st.integers(1, size + 2))


@st.composite
def indexes(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    count = draw(st.integers(0, len(shape)))
    is_split = draw(st.booleans())
    parts: list[Any] = []
    for dim in range(count):
        size = shape[dim]
        kinds = [_slices(size)] + ([st.integers(-size, size - 1)] if size and not is_split else [])
        parts.append(draw(st.one_of(kinds)))
    if is_split:
        parts.insert(draw(st.integers(0, count)), Ellipsis)
    return tuple(parts) if count != 1 or draw(st.booleans()) else parts[0]


@given(data=st.data())
@pytest.mark.parametrize("name", TENSORS)
def test_a_part_is_what_torch_says_it_is(lazy: dict[str, Any], name: str, data: st.DataObject) -> None:
    tensor = TENSORS[name]
    index = data.draw(indexes(tuple(tensor.shape)))
    try:
        wanted = tensor.detach()[index]
    except IndexError:
        # An ellipsis beside slices may mean more dimensions than there are.
        with pytest.raises(IndexError):
            lazy[name][index]
        return

    found = lazy[name][index]

    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted)
    assert found.is_contiguous()
    assert not found.requires_grad
    assert type(found) is torch.Tensor


@pytest.mark.parametrize(
    "index",
    [
        None,
        True,
        [0, 2],
        torch.tensor([1, 0]),
        np.array([1, 0]),
        (slice(None), [1, 1]),
        noise(4, 6, 5) > 0,
        np.int64(2),
        (..., ...),
    ],
)
def test_whatever_else_torch_understands_works_too(lazy: dict[str, Any], index: Any) -> None:
    assert torch.equal(lazy["contiguous"][index], TENSORS["contiguous"][index])


@pytest.mark.parametrize(
    "index",
    [4, -5, (0, 0, 0, 0), (..., 0, 0, 0, 0), slice(None, None, -1), slice(0, 2, 0), "a", 1.5, (0, 6)],
)
def test_what_torch_refuses_is_refused_in_its_words(lazy: dict[str, Any], index: Any) -> None:
    with pytest.raises((IndexError, ValueError, TypeError)) as wanted:
        TENSORS["contiguous"][index]

    with pytest.raises(wanted.type) as found:
        lazy["contiguous"][index]

    assert str(found.value) == str(wanted.value)


def test_a_part_of_shared_memory_has_memory_of_its_own(lazy: dict[str, Any]) -> None:
    part = lazy["alias"][0]

    part.zero_()

    assert torch.equal(lazy["alias"][0], noise(4, 6, 5)[1])
    assert torch.equal(lazy["base"].read(), noise(4, 6, 5))


# How much is read


class Counted:
    """One large tensor, and what is read of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        watched = Watched(MemoryStore())
        store = Store(watched)
        store.save("x", tensor)
        self.tensor = tensor
        self._watched = watched
        self._lazy = store.snapshot("x").open()
        self._snap = store.snapshot("x")

    def __call__(self, index: Any) -> int:
        """Read a part, see that it is right, and return how many bytes were read for it."""
        lazy = self._snap[()]
        self._watched.reads.clear()
        assert torch.equal(lazy[index], self.tensor[index])
        return sum(size for key, _, size in self._watched.reads if key.startswith(PACKS))


@pytest.fixture(scope="module")
def rows() -> Counted:
    """Rows of 64 KiB: 16 of them in a chunk, 128 in all."""
    return Counted(torch.arange(2 * MIB, dtype=torch.float32).reshape(128, -1))


@pytest.mark.parametrize(
    ("index", "chunks"),
    [
        (0, 1),
        (slice(0, 16), 1),
        (slice(15, 17), 2),
        (-1, 1),
        (slice(None, None, 16), 8),
        (slice(None, None, 32), 4),
        (slice(0, 0), 0),
        (slice(16, 96), 5),
        ((slice(3, 5), slice(0, 10)), 1),
        ((slice(None, None, 48), 5), 3),
        (slice(None), 8),
    ],
)
def test_only_the_chunks_of_the_rows_are_read(rows: Counted, index: Any, chunks: int) -> None:
    assert rows(index) == chunks * MIB


@pytest.mark.parametrize(
    ("index", "chunks"),
    [((0, slice(0, 10)), 1), ((1, -1), 1), ((slice(None), 5), 2), ((slice(None), slice(0, MIB)), 8), (1, 4)],
)
def test_of_rows_larger_than_a_chunk_only_a_part_is_read(index: Any, chunks: int) -> None:
    wide = Counted(torch.arange(2 * MIB, dtype=torch.float32).reshape(2, -1))

    assert wide(index) == chunks * MIB


def test_of_a_transposed_tensor_the_columns_are_read() -> None:
    columns = Counted(torch.arange(MIB, dtype=torch.float32).reshape(64, -1).t())

    assert columns((slice(None), 3)) == MIB
    assert columns((slice(0, 5), slice(16, 32))) == MIB


def test_rows_that_are_not_a_power_of_two_are_read_once() -> None:
    odd = Counted(torch.arange(40 * 75_000, dtype=torch.float32).reshape(40, -1))

    assert odd((slice(None), slice(0, 5))) == odd.tensor.nbytes
    assert odd(slice(None)) == odd.tensor.nbytes


@pytest.mark.parametrize("kind", ["unfolded", "quantised"])
def test_what_cannot_be_sliced_says_so(kind: str) -> None:
    store = Store(MemoryStore())
    store.save("a", {"odd": TENSORS[kind], "plain": TENSORS["transposed"], "scalar": TENSORS["scalar"]})
    snapshot = store.snapshot("a")

    assert not snapshot["odd"].is_sliceable
    assert snapshot["plain"].is_sliceable
    assert snapshot["scalar"].is_sliceable
