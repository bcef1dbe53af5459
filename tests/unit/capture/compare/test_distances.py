"""Many pairs measured at once: in order and in batches, with the numbers of single pairs on any number of cores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.capture.compare import measure
from holdfast.capture.compare.measure import Measurer, TensorPair
from holdfast.capture.stored.events import Event
from holdfast.capture.stored.runs import Run, _StoredRun
from holdfast.errors import Corrupt, NotFound
from holdfast.progress import ProgressUpdate
from holdfast.snapshot.load import ReusedMemory
from tests.kit.hooking import Hook
from tests.kit.planted_faults import Tiny
from tests.kit.thinning import pair_up

BUDGET = 64 << 20


def record_two(folder: Path, *, dtype: torch.dtype = torch.float32, steps: int = 3) -> holdfast.Store:
    """Record a run, and another one in which a parameter was changed before the second step."""
    store = holdfast.open(folder, create=True)
    for name in ("good", "bad"):
        torch.manual_seed(0)
        model = Tiny().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with store.record(name, model, optimizer, level="full"):
            for step in range(steps):
                if name == "bad" and step == 1:
                    with torch.no_grad():
                        model.layers[1].get_parameter("down.weight")[0, 0] += 0.5
                optimizer.zero_grad()
                model(torch.randn(4, 4, dtype=dtype)).square().mean().backward()
                optimizer.step()
    return store


def list_jobs(store: holdfast.Store) -> list[TensorPair]:
    good, bad = store.run("good"), store.run("bad")
    return [
        TensorPair(good, a, bad, b)
        for step in good.steps
        for a, b in zip(good.events(step), bad.events(step), strict=True)
        if a.digest != b.digest
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> holdfast.Store:
    return record_two(tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize(("batch_bytes", "cores"), pair_up([1, 1000, 1 << 20], [1, 2, 5]))
def test_batches_on_any_number_of_cores_give_the_numbers_of_single_pairs(
    store: holdfast.Store, cores: int, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = list_jobs(store)
    monkeypatch.setattr("holdfast.repo.engine.count_cores", lambda: cores)
    monkeypatch.setattr(measure, "_BATCH_BYTES", batch_bytes)

    with Measurer(None, budget_bytes=BUDGET) as measurer:
        found = list(measurer.iter_distances(jobs))

    assert len(jobs) > 20
    assert [repr(each) for each in found] == [repr(job.measure(None)) for job in jobs]
    assert {each.basis for each in found} == {"values"}


def test_the_whole_result_does_not_depend_on_the_number_of_cores(
    store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for cores in (1, 4):
        monkeypatch.setattr("holdfast.repo.engine.count_cores", lambda cores=cores: cores)
        results.append(store.diff_runs("good", "bad").to_json())

    assert results[0] == results[1]


def test_halves_are_read_and_measured_too(tmp_path: Path) -> None:
    jobs = list_jobs(record_two(tmp_path, dtype=torch.bfloat16, steps=2))

    with Measurer(None, budget_bytes=BUDGET) as measurer:
        found = list(measurer.iter_distances(jobs))

    assert "bfloat16" in {job.a.dtype for job in jobs}
    assert [repr(each) for each in found] == [repr(job.measure(None)) for job in jobs]


def test_each_tensor_of_a_batch_is_read_once_and_a_batch_with_few_reads(
    store: holdfast.Store, monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    reads: list[int] = []
    read = _StoredRun.read_tensors

    def count(run: _StoredRun, events: Sequence[Event], memory: ReusedMemory) -> Sequence[torch.Tensor]:
        reads.append(len(events))
        return read(run, events, memory)

    monkeypatch.setattr(_StoredRun, "read_tensors", count)
    hook.forbid(_StoredRun, "read_tensor")

    result = store.diff_runs("good", "bad")

    pairs = {(row.a.digest, row.b.digest) for row in result.rows if row.a and row.b and row.measure}
    assert sum(reads) == 2 * len(pairs)
    assert len(reads) == 2 * sum(not step.is_skipped for step in result.steps)


def test_a_pair_whose_segment_is_gone_is_measured_by_what_is_left(store: holdfast.Store, hook: Hook) -> None:
    jobs = list_jobs(store)[:3]

    def refuse(self: Run, *_: object) -> None:
        raise NotFound("the segment no longer exists")

    hook(_StoredRun, "read_tensors", refuse)
    hook(_StoredRun, "read_tensor", refuse)
    with Measurer(None, budget_bytes=BUDGET) as measurer:
        found = list(measurer.iter_distances(jobs))

    assert all(each.basis in ("stats", "digest") for each in found)


def test_a_damaged_tensor_ends_the_comparison_with_its_name(tmp_path: Path) -> None:
    record_two(tmp_path)
    pack = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    pack.write_bytes(data)

    with pytest.raises(Corrupt, match="@runs/"):
        holdfast.open(tmp_path).diff_runs("good", "bad")


def test_shapes_that_differ_and_missing_values_need_no_read(store: holdfast.Store) -> None:
    job = list_jobs(store)[0]
    other = job._replace(b=job.b._replace(shape=(1, 2, 3)))
    bare = job._replace(a=job.a._replace(leaf=""))

    assert (other.size_bytes, bare.size_bytes) == (0, 0)
    with Measurer(None, budget_bytes=BUDGET) as measurer:
        found = list(measurer.iter_distances([other, bare]))

    assert "shapes differ" in found[0].note
    assert found[1].basis == "stats"


def test_progress_counts_every_step_and_ends_complete(store: holdfast.Store) -> None:
    updates: list[ProgressUpdate] = []

    store.diff_runs("good", "bad", progress=updates.append)

    total = updates[0].total_bytes
    assert updates[0].task == "compare good with bad"
    assert total == sum(store.run(name).find_size_bytes(step) for name in ("good", "bad") for step in range(3)) > 0
    assert [update.done_bytes for update in updates] == sorted(update.done_bytes for update in updates)
    assert len({update.done_bytes for update in updates}) > 3  # steps, and batches within them
    assert (updates[-1].done_bytes, updates[-1].is_ended) == (total, True)


def test_progress_ends_if_the_comparison_fails(store: holdfast.Store, hook: Hook) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("stopped")

    updates: list[ProgressUpdate] = []
    hook(measure, "measure", refuse)
    with pytest.raises(RuntimeError, match="stopped"):
        store.diff_runs("good", "bad", progress=updates.append)

    assert updates[-1].is_ended
