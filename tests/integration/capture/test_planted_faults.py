"""Planted faults as a user meets them: trained, recorded to disk, compared, and named exactly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

import holdfast
from holdfast.capture.compare.compare import assert_runs_match
from holdfast.capture.compare.nan import find_nonfinite
from holdfast.capture.compare.rank_diffs import diff_ranks
from holdfast.capture.compare.result import Origin, RunDiff
from holdfast.capture.record.observer import RecordingWarning
from holdfast.capture.record.options import LevelName
from holdfast.objects.memory import MemoryStore
from holdfast.store import Store
from holdfast.testing.faults import Fault, FaultyStore
from holdfast.testing.ranks import run_ranks
from tests.integration.capture import transformer
from tests.integration.capture.transformer import Plant, Training, Transformer, use_adamw
from tests.kit.thinning import keep, thin

ROOT: Final = Path(__file__).parents[3]
STEPS: Final = range(3)
Optimizer = torch.optim.Optimizer

LEVELS: Final[tuple[LevelName, ...]] = ("digest", "stats", "full")

levels = pytest.mark.parametrize("level", LEVELS)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute in one thread: what is this small only waits for the others, and they may add up in another order."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return holdfast.open(tmp_path / "runs")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store that has the run without a fault once for all tests, since it is only read."""
    return holdfast.open(tmp_path_factory.mktemp("shared") / "runs")


def compare(store: Store, plant: Plant, *, level: str = "digest") -> RunDiff:
    """Record a run without a fault, if there is none yet, and one with it, and compare them."""
    good = f"good/{level}"
    if good not in [facts.name for facts in store.runs()]:
        Training().record(store, good, steps=STEPS, level=level)
    Training().record(store, "bad", plant=plant, steps=STEPS, level=level, overwrite=True)
    return store.diff_runs(good, "bad")


def name(origin: Origin | None) -> tuple[str, int, str]:
    assert origin is not None
    return (origin.fqn, origin.step, origin.phase)


def at_step(number: int, act: Callable[[Transformer], None]) -> Plant:
    """Return a fault that comes before that step."""

    def plant(step: int, model: Transformer, optimizer: Optimizer) -> None:
        if step == number:
            act(model)

    return plant


@levels
@pytest.mark.parametrize(("fqn", "step"), thin([("embed.weight", 0), ("layers.2.attention.qkv.weight", 2)]))
def test_a_weight_off_by_a_millionth_is_named(shared: Store, fqn: str, step: int, level: str) -> None:
    def disturb(model: Transformer) -> None:
        with torch.no_grad():
            model.get_parameter(fqn).view(-1)[5] += 1e-6

    result = compare(shared, at_step(step, disturb), level=level)

    assert name(result.origin) == (fqn, step, "forward")
    assert result.headline == f"step {step}, forward, {fqn}: parameter differs by itself"


@levels
@pytest.mark.parametrize("step", keep([0, 2], 2))
def test_an_operation_in_bfloat16_is_named_by_the_module_that_does_it(shared: Store, step: int, level: str) -> None:
    def round_off(model: Transformer) -> None:
        model.layers[1].get_submodule("attention").dtype = torch.bfloat16  # type: ignore[assignment]

    origin = compare(shared, at_step(step, round_off), level=level).origin

    assert name(origin) == ("layers.1.attention", step, "forward")
    assert origin is not None
    assert "what it passes to layers.1.attention.proj differs" in origin.why
    assert origin.source.startswith("transformer.py:")


@levels
def test_a_module_in_bfloat16_is_named(shared: Store, level: str) -> None:
    def round_off(model: Transformer) -> None:
        act = model.layers[3].get_submodule("act")
        act.forward = lambda x: gelu(x.bfloat16()).float()

    result = compare(shared, at_step(0, round_off), level=level)

    assert name(result.origin) == ("layers.3.act", 0, "forward")


@levels
@pytest.mark.parametrize("step", keep([0, 2], 2))
def test_swapped_layers_are_named_by_the_first_that_has_moved(shared: Store, step: int, level: str) -> None:
    def swap(model: Transformer) -> None:
        model.order = [0, 2, 1, 3]

    origin = compare(shared, at_step(step, swap), level=level).origin

    assert name(origin) == ("layers.1", step, "forward")
    assert origin is not None
    assert "calls come in another order: it is called after layers.2 in bad" in origin.why


@levels
@pytest.mark.parametrize("step", keep([0, 2], 2))
def test_a_dropout_left_on_is_named(shared: Store, step: int, level: str) -> None:
    def leave_on(model: Transformer) -> None:
        model.layers[2].get_submodule("drop").train()

    result = compare(shared, at_step(step, leave_on), level=level)

    assert name(result.origin) == ("layers.2.drop", step, "forward")
    assert result.counts["origin"] == 1


@pytest.mark.parametrize("level", ["stats", "full"])
@pytest.mark.parametrize("layer", [0, 3])
def test_a_nan_from_a_logarithm_of_zero_is_named_by_its_layer(shared: Store, layer: int, level: str) -> None:
    def take_logarithm(model: Transformer) -> None:
        # Zero times minus infinity, where the input is not positive.
        act = model.layers[layer].get_submodule("act")
        act.forward = lambda x: torch.log(torch.relu(x)) * 0

    result = compare(shared, at_step(2, take_logarithm), level=level)
    found = find_nonfinite(shared.run("bad"))

    assert name(found.origin) == (f"layers.{layer}.act", 2, "forward")
    assert name(result.origin) == (f"layers.{layer}.act", 2, "forward")
    assert find_nonfinite(shared.run(f"good/{level}")).origin is None


def resume(store: Store, *, keeps_optimizer: bool) -> RunDiff:
    """Record a training of four steps that is saved after two, and the rest of it, resumed from there."""
    whole = Training(drops=True)
    whole.record(store, "first", steps=range(2))
    state = {"model": whole.model, "optimizer": whole.optimizer, "rng": holdfast.RngState()}
    store.save("step-2", state)
    again = Training(drops=True)
    again.record(store, "whole")
    resumed = Training(drops=True)
    wanted: dict[str, Any] = {"model": resumed.model, "rng": holdfast.RngState()}
    if keeps_optimizer:
        wanted["optimizer"] = resumed.optimizer
    store.load_into("step-2", wanted, strict=False)
    resumed.record(store, "resumed", steps=range(2, 4))
    return store.diff_runs("whole", "resumed", shift=2)


def test_a_resume_that_lost_the_optimizers_state_is_named(store: Store) -> None:
    origin = resume(store, keeps_optimizer=False).origin

    assert name(origin) == ("embed.weight", 2, "optimizer")
    assert origin is not None
    assert origin.kind == "optimizer"


def test_a_resume_that_lost_nothing_is_equal(store: Store) -> None:
    result = resume(store, keeps_optimizer=True)

    assert result.is_equal, result.headline


OPTIMIZERS: Final[tuple[Callable[[Any], Optimizer], ...]] = (
    use_adamw,
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, centered=True),
)


class Recurrent(nn.Module):
    """A module that returns a tuple of tuples, inside of one that takes a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.lstm(x)[0])
        return found


MODELS: Final[tuple[Callable[[], nn.Module], ...]] = (
    lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 1)),
    lambda: nn.Sequential(nn.Conv1d(5, 8, 3), nn.BatchNorm1d(8), nn.GELU(), nn.Flatten(), nn.Linear(32, 2)),
    Recurrent,
    lambda: nn.TransformerEncoderLayer(6, 2, 12, batch_first=True),
    lambda: nn.Sequential(nn.Linear(6, 6).bfloat16(), nn.LayerNorm(6).bfloat16()),
)


def train_model(store: Store, run: str, number: int) -> None:
    """Record three steps of one of the models with one of the optimizers."""
    torch.manual_seed(number)
    model = MODELS[number % 5]()
    optimizer = OPTIMIZERS[number % 4](model.parameters())
    with store.record(run, model, optimizer, level=LEVELS[number % 3], segment_steps=1 + number % 3):
        for _ in range(3):
            batch = torch.randn(4, 5, 6).to(next(model.parameters()).dtype)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("number", thin(range(20), 5))
def test_clean_pairs_have_no_origin(store: Store, number: int) -> None:
    train_model(store, "a", number)
    train_model(store, "b", number)

    result = store.diff_runs("a", "b")

    assert result.origin is None
    assert result.headline == "a and b are equal in 3 steps"
    assert assert_runs_match(store.run("a"), store.run("b")).is_equal


def test_an_assertion_fails_with_the_site_where_runs_diverge(shared: Store) -> None:
    compare(shared, at_step(1, lambda model: model.drop_out(on=True)))

    with pytest.raises(AssertionError, match=r"^step 1, forward, layers\.0\.drop: output differs though inputs"):
        assert_runs_match(shared.run("good/digest"), shared.run("bad"))


@pytest.mark.slow  # processes that import torch
def test_one_rank_with_another_seed_is_named_with_its_rank(tmp_path: Path) -> None:
    root = str(tmp_path / "runs")
    for run, odd in (("good", False), ("again", False), ("bad", True)):
        run_ranks(2, transformer.train_on_rank, root, run, odd)
    store = holdfast.open(root)

    result = store.diff_runs("good", "bad")

    assert name(result.origin) == ("cpu", 1, "forward")
    assert result.origin is not None
    assert (result.origin.rank, result.origin.kind) == (1, "rng")
    assert store.diff_runs("good", "again").is_equal
    replicas = diff_ranks(store.run("bad"))
    assert replicas.origin is None
    assert replicas.checked


@pytest.mark.slow  # torch's tracing takes seconds before it begins
@pytest.mark.filterwarnings("ignore::holdfast.capture.record.observer.RecordingWarning")  # what is inside is not seen
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_a_compiled_layer_that_computes_something_else_is_named(store: Store, factor: float) -> None:
    def translate(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        return lambda *args: tuple(result * factor for result in graph(*args))

    torch.compiler.reset()
    Training().record(store, "eager", level="full", steps=range(2))
    training = Training()
    for number, layer in enumerate(training.model.layers):
        layer.compile(backend=translate if number == 2 else "aot_eager")
    training.record(store, "compiled", level="full", steps=range(2))

    result = store.diff_runs("eager", "compiled")

    assert result.is_match if factor == 1.0 else name(result.origin) == ("layers.2", 0, "forward")


@pytest.mark.slow  # a process that imports torch
def test_what_was_committed_before_a_crash_is_readable_and_compared(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    # As many threads as here: sums are rounded otherwise with another number.
    code = (
        f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
        f"from tests.integration.capture import transformer; transformer.train_until_death({str(root)!r}, 5)"
    )
    died = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert died.returncode == 9, died.stderr
    store = holdfast.open(root)
    Training().record(store, "whole", steps=range(5))

    result = store.diff_runs("whole", "run")

    assert store.run("run").facts.status == "unfinished"
    # The first segment is one step, and the next two; steps 3 and 4 were waiting to be committed.
    assert list(store.run("run").steps) == [0, 1, 2]
    assert result.is_equal
    assert "run: the recording was not finished" in result.notes
    assert "whole: steps 3-4 are not in run" in result.notes
    assert {finding.severity for finding in store.check(read=True)} <= {"note"}


@pytest.mark.parametrize("at", [25, 60])
def test_a_full_disk_stops_no_training_and_is_reported(at: int) -> None:
    bare = Training()
    expected = [bare.step(number) for number in range(6)]
    inner = MemoryStore()
    store = Store(FaultyStore(inner, fault=Fault.NO_SPACE, at=at))

    with pytest.warns(RecordingWarning) as caught:
        found = Training().record(store, "run", level="full", steps=range(6), segment_steps=1)

    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert any("could not be written" in str(each.message) for each in caught)


def test_what_was_written_before_the_disk_was_full_is_compared() -> None:
    inner = MemoryStore()
    probe = FaultyStore(MemoryStore())
    Training().record(Store(probe), "run", level="full", steps=range(2), segment_steps=1)
    faulty = FaultyStore(inner, fault=Fault.NO_SPACE, at=len(probe.log) + 1)

    with pytest.warns(RecordingWarning):
        Training().record(Store(faulty), "run", level="full", steps=range(8), segment_steps=1)

    store = Store(inner)
    Training().record(store, "whole", level="full", steps=range(8))
    result = store.diff_runs("whole", "run")
    assert result.is_match
    assert result.steps
    assert store.run("run").facts.status == "unfinished"


def test_a_call_is_replayed_after_the_recording_and_the_run_stays_complete(store: Store) -> None:
    training = Training()
    with store.record("run", training.model, training.optimizer, level={"layers.1": "full", "*": "digest"}) as rec:
        training.step(0)

    replayed = rec.replay("layers.1.up", step=0, dtype=torch.float64)

    assert 0 < replayed.max_abs < 1e-6
    assert store.run("run").facts.status == "complete"


def test_gradients_that_were_changed_after_the_backward_pass_are_distinguished_from_one_that_is_wrong(
    shared: Store,
) -> None:
    def halve(grad: torch.Tensor) -> torch.Tensor:
        return grad * 0.5

    def halve_all(model: Transformer) -> None:
        for parameter in model.parameters():
            parameter.register_hook(halve)  # type: ignore[no-untyped-call]  # torch's

    def halve_one(model: Transformer) -> None:
        model.layers[1].get_parameter("up.bias").register_hook(halve)  # type: ignore[no-untyped-call]  # as well

    everywhere = compare(shared, at_step(1, halve_all)).origin
    once = compare(shared, at_step(1, halve_one)).origin

    assert everywhere is not None
    assert everywhere.why.endswith(
        "; the same holds for 50 other parameters: something may have changed all gradients after the backward pass"
    )
    assert name(once) == ("layers.1.up", 1, "backward")
    assert once is not None
    assert once.why.endswith("the gradient of its outputs are equal")
