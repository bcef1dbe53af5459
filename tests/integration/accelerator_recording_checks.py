"""Recordings of training on another device than the CPU; `test_accelerator.py` runs this beside a fake one."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.capture.compare.compare import assert_runs_match
from holdfast.capture.record import observer
from holdfast.capture.record.observer import RecordingWarning
from holdfast.capture.record.replay import hash_all
from holdfast.capture.stored.events import Event
from holdfast.digest import fingerprint, hash_bytes
from holdfast.repo.names.snapshots import DamagedName, iter_names
from holdfast.store import Store
from holdfast.tensors.device_digest import deferred
from holdfast.tensors.device_digest.pieces import Part
from holdfast.tensors.device_digest.side_stream import HostLink
from holdfast.tensors.device_digest.torch_ops import TorchKernels
from tests.cli.runs import Cli
from tests.integration.accelerator import ACCELERATOR, DEVICE, QuickKernels
from tests.kit.hooking import hooked

CPU = torch.device("cpu")
STEPS = 2


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(deferred, "find_kernels", lambda device: QuickKernels())
    return holdfast.open(tmp_path / "ckpts")


class Training:
    """A small model that is trained on a device, always in the same way."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(7)
        self.device = device
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.model.to(device)
        self.last: Any = self.model[2]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)

    def step(self, number: int) -> None:
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(number)).to(self.device)
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()


def record(store: Store, name: str, device: torch.device = DEVICE, *, change_at: int = -1, **options: Any) -> None:
    train(store, name, Training(device), change_at=change_at, **options)


def train(store: Store, name: str, training: Training, *, change_at: int = -1, **options: Any) -> None:
    with store.record(name, training.model, training.optimizer, **options):
        for number in range(STEPS):
            if number == change_at:
                training.last.weight.data[0, 0] += 1
            training.step(number)


def events_of(store: Store, name: str) -> Iterator[Event]:
    run = store.run(name)
    return (event for step in run.steps for event in run.events(step))


def read_segments(store: Store, name: str) -> list[dict[str, Any]]:
    """Return the metadata of each segment of a run."""
    records = iter_names(store.repository.store, f"@runs/{name}/")
    return [dict(record.metadata)["run"] for record in records if not isinstance(record, DamagedName)]


def test_at_level_digest_nothing_but_digests_is_copied_to_the_host(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = TorchKernels(DEVICE)
    monkeypatch.setattr(deferred, "find_kernels", lambda device: kernels)
    ACCELERATOR.bytes_to_host = 0

    record(store, "a")

    copied = ACCELERATOR.bytes_to_host
    remote = [event for event in events_of(store, "a") if event.blake3]
    assert len(remote) > 30 * STEPS
    assert {event.digest for event in remote} == {b""}
    # 32 bytes for each tensor, and for the random bytes that are hashed beside them, once for each segment.
    segments = [segment for segment in read_segments(store, "a") if segment["roots"]]
    assert copied == 32 * (len(remote) + len(segments))
    assert {segment["version"] for segment in segments} == {2}


def test_the_digests_are_those_of_the_bytes(store: Store) -> None:
    training = Training(DEVICE)
    before = {name: hash_bytes(each.cpu().numpy().tobytes()) for name, each in training.model.state_dict().items()}

    record(store, "a")

    found = [event for event in store.run("a").events(0) if event.site.kind == "parameter"]
    assert {event.site.fqn: event.blake3 for event in found if event.site.phase == "forward"} == before


def test_equal_runs_are_equal_as_a_whole(store: Store) -> None:
    record(store, "a")
    record(store, "b")

    diff = store.diff_runs("a", "b")

    assert diff.is_equal
    assert all(step.is_skipped for step in diff.steps)


def test_a_changed_weight_is_found_at_its_origin(store: Store) -> None:
    record(store, "a")
    record(store, "b", change_at=1)

    diff = store.diff_runs("a", "b")

    assert diff.origin is not None
    assert (diff.origin.fqn, diff.origin.step, diff.origin.kind) == ("2.weight", 1, "parameter")
    assert diff.counts["unknown"] == 0
    # The wrong weight is used by the output of its module, which is found by the bytes of its input.
    assert [row.event.site.fqn for row in diff.rows if row.cls == "origin"] == ["2.weight"]


def test_runs_of_different_levels_are_compared_by_the_digests_that_both_have(store: Store) -> None:
    record(store, "digests")
    record(store, "values", level="full")
    record(store, "statistics", level={"2": "stats", "*": "digest"})

    for name in ("values", "statistics"):
        assert store.diff_runs("digests", name).is_equal
    both = [event for event in events_of(store, "values") if event.blake3]
    assert both
    assert all(event.digest for event in both)


def test_a_run_of_the_cpu_is_never_said_to_differ_from_one_of_the_device(store: Store) -> None:
    record(store, "host", CPU)
    record(store, "device")

    for a, b in (("host", "device"), ("device", "host")):
        diff = store.diff_runs(a, b)
        assert diff.origin is None
        assert (diff.is_match, diff.is_equal) == (False, False)
        assert diff.counts["unknown"] > 30 * STEPS
        (note,) = [note for note in diff.notes if note.startswith("digests are of different kinds")]
        assert "device hashed" in note
        assert "host on the host (XXH3)" in note
        with pytest.raises(AssertionError, match="could not be compared: their digests are of different kinds"):
            assert_runs_match(store.run(a), store.run(b))


class Hybrid(Training):
    """A model whose first layers are on the device, and the last one on the CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.last.to(CPU)
        self.last.register_forward_pre_hook(lambda module, inputs: tuple(each.cpu() for each in inputs))


def test_a_difference_after_tensors_that_were_not_compared_may_follow_from_these(store: Store) -> None:
    host, device = Hybrid(CPU), Hybrid(DEVICE)
    next(device.model.parameters()).data[0, 0] += 1
    train(store, "host", host)
    train(store, "device", device)

    origin = store.diff_runs("host", "device").origin

    assert origin is not None
    assert origin.step == 0
    assert re.search(r"; but \d+ tensors before it could not be compared, so it may follow from there", origin.why)


@pytest.mark.parametrize("level", ["stats", "full"])
def test_with_statistics_or_values_a_run_of_the_cpu_is_compared_with_one_of_the_device(
    store: Store, level: Any
) -> None:
    record(store, "host", CPU, level=level)
    record(store, "device", level=level)
    record(store, "other", level=level, change_at=1)

    # The fake device computes what the CPU computes.
    assert store.diff_runs("host", "device").is_match
    origin = store.diff_runs("host", "other").origin
    assert origin is not None
    assert (origin.fqn, origin.step) == ("2.weight", 1)


def test_a_run_with_both_digests_is_compared_with_any_other(store: Store) -> None:
    record(store, "host", CPU, hashes="both")
    record(store, "plain", CPU)
    record(store, "device")
    record(store, "other", change_at=1)

    assert store.diff_runs("host", "device").is_equal
    assert store.diff_runs("host", "plain").is_equal
    origin = store.diff_runs("host", "other").origin
    assert origin is not None
    assert (origin.fqn, origin.step) == ("2.weight", 1)
    assert store.diff_runs("plain", "device").counts["unknown"]


def test_both_digests_of_a_device_are_compared_with_the_cpu_too(store: Store) -> None:
    record(store, "host", CPU)
    record(store, "device", hashes="both")

    assert store.diff_runs("host", "device").is_equal


def test_recordings_of_the_cpu_are_as_before(store: Store) -> None:
    record(store, "host", CPU)

    assert {segment["version"] for segment in read_segments(store, "host")} == {1}
    assert not any(event.blake3 for event in events_of(store, "host"))


def test_where_kernels_are_wrong_tensors_are_copied_and_hashed_on_the_host(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "can_defer", lambda device: False)
    record(store, "device")
    record(store, "host", CPU)

    assert store.diff_runs("host", "device").is_equal
    assert {segment["version"] for segment in read_segments(store, "device")} == {1}


def test_a_tensor_is_hashed_as_it_was_when_the_hook_ran(store: Store) -> None:
    model = torch.nn.Linear(3, 3).to(DEVICE)
    inputs = torch.ones(2, 3).to(DEVICE)
    expected = hash_bytes(torch.ones(2, 3).numpy().tobytes())

    with store.record("a", model):
        model(inputs)
        inputs.fill_(5)

    (found,) = [event for event in events_of(store, "a") if event.site.kind == "input"]
    assert found.blake3 == expected


def test_hooks_copy_nothing_to_the_host(store: Store) -> None:
    training = Training(DEVICE)
    with store.record("a", training.model, training.optimizer):
        ACCELERATOR.bytes_to_host = 0
        training.step(0)
        assert ACCELERATOR.bytes_to_host == 0

    assert ACCELERATOR.bytes_to_host > 32 * 30


def test_without_memory_to_hash_on_the_device_tensors_are_hashed_on_the_host(store: Store) -> None:
    record(store, "host", CPU)
    with hooked(deferred.DeferredDigests, "queue", fail_for_memory):
        with pytest.warns(RecordingWarning, match=f"{DEVICE} had no memory left to compute digests"):
            record(store, "device")

    diff = store.diff_runs("host", "device")
    assert diff.counts["unknown"] == 0
    assert diff.is_equal


def fail_for_memory(self: deferred.DeferredDigests, tensor: torch.Tensor) -> int:
    raise torch.OutOfMemoryError("no memory")


def test_tensors_that_share_memory_on_the_device_have_one_number(store: Store) -> None:
    model = torch.nn.Flatten().to(DEVICE)

    with store.record("a", model):
        model(torch.ones(2, 3, 4).to(DEVICE))

    found = [event for event in events_of(store, "a") if event.site.kind in ("input", "output")]
    assert len({event.alias for event in found}) == 1


def test_a_drill_does_not_see_the_operations_that_hash(store: Store) -> None:
    training = Training(DEVICE)
    with store.record("a", training.model, drill="2"):
        training.model(torch.ones(2, 4).to(DEVICE))

    names = {event.module for event in events_of(store, "a") if event.site.kind == "op"}
    assert names
    assert all("addmm" in name or "linear" in name or "mm" in name for name in names)


def test_a_device_that_computes_wrong_digests_ends_up_as_a_note_and_the_training_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, training = Training(DEVICE), Training(DEVICE)
    for number in range(STEPS):
        expected.step(number)

    monkeypatch.setattr(QuickKernels, "hash_parts", lambda self, parts, link: torch.zeros(len(parts), 8).int())
    with pytest.warns(RecordingWarning, match="wrong digest of random bytes"):
        train(store, "a", training, segment_steps=1)

    assert not any(event.blake3 for event in events_of(store, "a"))
    for ours, theirs in zip(training.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())


def fail_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the first launch compute nothing."""
    hash_parts, launches = QuickKernels.hash_parts, count()

    def hash_or_fail(self: QuickKernels, parts: Sequence[Part], link: HostLink) -> torch.Tensor:
        found = hash_parts(self, parts, link)
        return found if next(launches) else torch.zeros_like(found)

    monkeypatch.setattr(QuickKernels, "hash_parts", hash_or_fail)


@pytest.mark.parametrize("level", ["stats", "full"])
def test_a_device_that_fails_once_loses_no_statistics_and_no_values(
    store: Store, monkeypatch: pytest.MonkeyPatch, level: Any
) -> None:
    record(store, "whole", level=level, segment_steps=1)
    fail_first(monkeypatch)

    with pytest.warns(RecordingWarning, match="a device computed no digests for a segment .* recording continue"):
        record(store, "a", level=level, segment_steps=1)

    found, whole = list(events_of(store, "a")), list(events_of(store, "whole"))
    assert [event.digest for event in found] == [event.digest for event in whole]
    assert [event.stats for event in found] == [event.stats for event in whole]
    assert [bool(event.leaf) for event in found] == [bool(event.leaf) for event in whole]
    assert {event.site.step for event in found if event.blake3} == {1}
    assert store.diff_runs("a", "whole").is_equal


def test_a_device_that_fails_once_loses_the_digests_of_one_segment(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(store, "whole", segment_steps=1)
    fail_first(monkeypatch)

    with pytest.warns(RecordingWarning, match="wrong digest of random bytes"):
        record(store, "a", segment_steps=1)

    run, whole = store.run("a"), store.run("whole")
    assert run.root(1) == whole.root(1)
    assert len(run.events(0)) == len([event for event in whole.events(0) if event.digest])
    assert run.facts.status == "complete"
    (note,) = run.facts.notes
    assert "tensors of which nothing else was kept are not in it" in note


def test_copies_of_full_tensors_that_fill_the_queue_keep_their_digests(store: Store) -> None:
    record(store, "small", level="full", queue_bytes=2000)
    record(store, "large", level="full")

    assert store.diff_runs("small", "large").is_equal


def test_a_recorded_step_gives_the_same_result(store: Store) -> None:
    training = Training(DEVICE)
    recorded = copy.deepcopy(training.model)
    inputs = torch.ones(2, 4).to(DEVICE)
    state = torch.get_rng_state()

    with store.record("a", recorded):
        found = recorded(inputs)

    assert torch.equal(found.cpu(), training.model(inputs).cpu())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_command_line_names_what_could_not_be_compared(
    store: Store, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    record(store, "host", CPU)
    record(store, "device")
    run = Cli(tmp_path, capsysbinary)

    found = run("run", "diff", "host", "device")

    assert found.code == 1
    assert "could not be compared: their digests are of different kinds" in found.out
    assert "note: digests are of different kinds: device hashed" in found.out
    assert " unknown" in found.out.splitlines()[-1]
    assert run("run", "events", "device").code == 0
    words = ["run", "tensor", "device", "2.weight", "--kind", "parameter", "--phase", "forward"]
    assert run(*words).code == 0
    against = run(*words, "--against", "host")
    assert (against.code, "cannot be compared: the digests are of different kinds" in against.out) == (1, True)


@pytest.mark.usefixtures("store")
def test_a_step_is_checked_without_copies_of_its_tensors() -> None:
    tensors = {"there": torch.arange(5000, device=DEVICE), "here": torch.arange(3)}
    ACCELERATOR.bytes_to_host = 0

    found = hash_all(tensors)

    # One digest, and that of the random bytes beside it.
    assert ACCELERATOR.bytes_to_host == 2 * 32
    assert found["there"] == hash_bytes(torch.arange(5000).numpy().tobytes())
    assert found["here"] == fingerprint(torch.arange(3).numpy().tobytes())
