"""Files that contain tensors share chunks with these tensors, and any file comes back byte for byte."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import SourceChanged
from holdfast.files import keep as module
from holdfast.files.keep import MIN_FILE_BYTES, MIN_TENSOR_BYTES, FileCuts, plan_cuts, read_cuts
from holdfast.repo.files import FileSource, plan_files
from holdfast.repo.format.chunk import CHUNK_BYTES
from holdfast.repo.format.grid import Extent
from tests.kit.tensor_files import make_safetensors, write_safetensors, write_torch
from tests.kit.tensor_planning import plan_sources

MIB = 1 << 20


def plan(path: Path) -> FileSource:
    return plan_files([str(path)])[0]


def list_chunks(path: Path) -> set[bytes]:
    data = path.read_bytes()
    return {data[start:stop] for start, stop in pairwise([0, *read_cuts(plan(path)).ends])}


def list_tensor_chunks(state: dict[str, torch.Tensor]) -> set[bytes]:
    return {
        bytes(source.read(start, stop))
        for source in plan_sources(list(state.items()))
        for start, stop in pairwise([0, *source.cuts])
    }


def fill(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


STATES = {
    "rows": {"a": fill(700, 1000), "b": fill(3, 5, 30_000), "c": fill(2, 400_000)},
    "one dim": {"a": fill(900_001)},
    "half": {"a": fill(700, 1000, dtype=torch.bfloat16), "b": fill(1111, 999, dtype=torch.float16)},
    "scalars and empty": {"a": fill(700, 1000), "b": torch.tensor(1.0), "c": torch.zeros(0, 4)},
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("write", [write_safetensors, write_torch], ids=["safetensors", "torch"])
def test_a_file_has_the_chunks_of_its_tensors(tmp_path: Path, state: str, write: object) -> None:
    assert callable(write)
    tensors = STATES[state]
    write(tmp_path / "model", tensors)

    assert {each for each in list_tensor_chunks(tensors) if len(each) >= MIN_TENSOR_BYTES} <= list_chunks(
        tmp_path / "model"
    )


def test_a_transposed_and_a_tied_tensor_are_shared_too(tmp_path: Path) -> None:
    weight = fill(700, 1000)
    tensors = {"a": weight, "b": weight, "c": fill(800, 900).t()}
    write_torch(tmp_path / "model.pt", tensors)

    assert list_tensor_chunks(tensors) <= list_chunks(tmp_path / "model.pt")


def test_many_small_tensors_do_not_make_many_chunks(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m", {f"t{number}": fill(50) for number in range(2000)})

    assert read_cuts(plan(path)) == FileCuts()


def test_small_tensors_stay_with_the_bytes_around_them() -> None:
    small, large = Extent(100, 100 + MIN_TENSOR_BYTES - 1), Extent(10_000, 10_000 + MIN_TENSOR_BYTES)

    assert plan_cuts([small, large], 20_000) == FileCuts([10_000, 10_000 + MIN_TENSOR_BYTES, 20_000], {10_000})


def test_a_file_without_tensors_has_the_ordinary_grid(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"word " * MIB)

    assert read_cuts(plan(tmp_path / "text")) == FileCuts()


def test_a_small_file_is_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").write_bytes(bytes(MIN_FILE_BYTES - 1))
    (tmp_path / "large").write_bytes(bytes(MIN_FILE_BYTES))
    looked: list[bytes] = []
    monkeypatch.setattr(module, "_choose_reader", looked.append)

    for name in ("small", "large"):
        assert read_cuts(plan(tmp_path / name)) == FileCuts()

    assert looked == [bytes(9)]


def test_a_file_that_has_changed_since_it_was_planned_is_an_error(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "m.pt", fill(700, 1000))
    source = plan(path)
    path.write_bytes(path.read_bytes() + b"x")

    with pytest.raises(SourceChanged, match="changed while it was being saved"):
        read_cuts(source)


@pytest.fixture(scope="module")
def model() -> dict[str, torch.Tensor]:
    pytest.importorskip("transformers", reason="needs Transformers, which `make test` installs")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=128, n_layer=2, n_head=2, vocab_size=6000, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    state: dict[str, torch.Tensor] = GPT2LMHeadModel(config).state_dict()
    return state


def _write_model(path: Path, state: dict[str, torch.Tensor], kind: str) -> Path:
    if kind == "torch":
        return write_torch(path, state)
    # safetensors refuses tied weights: the output layer is the embedding.
    return write_safetensors(path, {name: each for name, each in state.items() if name != "lm_head.weight"})


@pytest.mark.parametrize("first", ["file", "tensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_model_and_its_file_share_their_bytes(
    tmp_path: Path, model: dict[str, torch.Tensor], kind: str, dtype: torch.dtype, first: str
) -> None:
    embedding = model["transformer.wte.weight"].to(dtype)
    tied = ("transformer.wte.weight", "lm_head.weight")
    state = {name: embedding if name in tied else each.to(dtype) for name, each in model.items()}
    path = _write_model(tmp_path / "model", state, kind)
    store = holdfast.open(tmp_path / "store")
    steps = [partial(store.put, "file", path), partial(store.save, "tensors", state)]

    _, second = [step() for step in (steps if first == "file" else reversed(steps))]

    assert second.new_bytes <= 0.05 * path.stat().st_size
    store.get("file", tmp_path / "out")
    assert (tmp_path / "out/model").read_bytes() == path.read_bytes()
    assert store.check(read=True) == []


def _round_trip(data: bytes) -> None:
    """Put a file into a store and take it out again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        store = holdfast.open("memory://")
        store.put("a", path)

        cuts = read_cuts(plan(path)).ends
        store.get("a", Path(folder) / "out")

        assert all(0 < stop - start <= CHUNK_BYTES for start, stop in pairwise([0, *cuts]))
        assert (Path(folder) / "out/file").read_bytes() == data
        with store.open_file("a", "file") as stream:
            assert stream.read() == data


edges = st.integers(0, 280_000) | st.integers()


@st.composite
def headers(draw: st.DrawFn) -> dict[str, object]:
    """Draw a header whose tensors follow each other, with a few numbers replaced by others."""
    offsets = sorted(draw(st.lists(st.integers(0, 280_000), min_size=2, max_size=6)))
    header: dict[str, object] = {}
    for number, sound in enumerate(pairwise(offsets)):
        start, stop = (draw(edges), draw(edges)) if draw(st.integers(0, 9)) == 0 else sound
        shape = draw(st.sampled_from([[stop - start], [1, stop - start], [7], []]))
        header[f"t{number}"] = {"dtype": "U8", "shape": shape, "data_offsets": [start, stop]}
    return header


@given(headers(), st.integers(0, 200))
def test_a_file_with_any_header_comes_back_byte_for_byte(header: dict[str, object], missing: int) -> None:
    data = make_safetensors(header) + bytes(range(256)) * 1100
    _round_trip(data[: len(data) - missing])


@given(st.binary(min_size=1, max_size=80), st.integers(0, 1 << 19), st.sampled_from(["replace", "truncate"]))
def test_a_damaged_archive_comes_back_byte_for_byte(noise: bytes, at: int, how: str) -> None:
    sound = _archive()
    at %= len(sound)
    _round_trip(sound[:at] + noise + (sound[at + len(noise) :] if how == "replace" else b""))


def _archive() -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        torch.save({"a": torch.arange(40_000), "b": torch.arange(3000)}, file.name)
        return file.read()


def test_a_header_of_one_large_item_comes_back(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "?", "shape": [1], "data_offsets": [0, 3 * MIB]}}).encode()

    _round_trip(make_safetensors(header, data_bytes=3 * MIB))
