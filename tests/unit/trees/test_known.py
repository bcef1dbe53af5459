"""Classes of well-known libraries need no types=; any other class is refused, and its module is not imported."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from holdfast.errors import Unsupported
from holdfast.objects.memory import MemoryStore
from holdfast.store import Store
from holdfast.trees.registered import KNOWN, Types, find_kind, import_known, is_known

LISTED = "torchao.optim.subclass_8bit:OptimState8bit"
MODULE, NAME = LISTED.split(":")


class Pair(torch.Tensor):
    """A tensor made of two others, as libraries for quantisation have them."""

    a: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def __new__(cls: type[Pair], a: torch.Tensor, b: torch.Tensor) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
        made.a, made.b = a, b
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, int]]:
        return ["a", "b"], {"scale": 3}

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: Any, shape: Any, stride: Any) -> Pair:
        assert context == {"scale": 3}
        return cls(parts["a"], parts["b"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].a, args[0].b)
        raise NotImplementedError(func)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], None]:
    """Puts a class at the place of a listed one, as if its library was installed."""

    def plant(cls: type) -> None:
        module = ModuleType(MODULE)
        cls.__module__, cls.__qualname__ = MODULE, NAME
        setattr(module, NAME, cls)
        monkeypatch.setitem(sys.modules, MODULE, module)

    return plant


def make_pair_class() -> type[Pair]:
    return type("Pair", (Pair,), {})


def test_a_listed_class_is_saved_and_loaded_without_being_registered(planted: Callable[[type], None]) -> None:
    cls = make_pair_class()
    planted(cls)
    store = Store(MemoryStore())
    store.save("a", {"w": cls(torch.arange(3.0), torch.ones(2))})

    loaded = Store(store.repository.store).load("a")["w"]

    assert type(loaded) is cls
    assert torch.equal(loaded.a, torch.arange(3.0))
    assert torch.equal(loaded.b, torch.ones(2))


def test_a_class_that_only_has_the_name_of_a_listed_one_is_refused(planted: Callable[[type], None]) -> None:
    planted(make_pair_class())
    impostor = make_pair_class()
    impostor.__module__, impostor.__qualname__ = MODULE, NAME

    assert not is_known(impostor)
    with pytest.raises(Unsupported, match=r"pass types=\[Pair\] to holdfast.open"):
        Store(MemoryStore()).save("a", {"w": impostor(torch.ones(3), torch.ones(3))})


def test_a_listed_name_that_is_no_tensor_class_is_refused(planted: Callable[[type], None]) -> None:
    planted(dataclasses.make_dataclass("Thing", ["x"]))

    with pytest.raises(Unsupported, match="is a dataclass here, and should be a tensor"):
        Types().find(LISTED)


def test_a_listed_class_that_the_library_does_not_have_is_refused(planted: Callable[[type], None]) -> None:
    planted(make_pair_class())
    delattr(sys.modules[MODULE], NAME)

    with pytest.raises(Unsupported, match="this version of torchao does not have"):
        Types().find(LISTED)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})

    with pytest.raises(Unsupported, match="torchao is not installed here: pip install torchao"):
        Types().find(LISTED)


@pytest.mark.parametrize(
    "type_id",
    ["planted_evil:Thing", "torchao.optim.subclass_8bit:Other", "os:system", "torchao:x.y", "", ":", "planted_evil"],
)
def test_a_class_that_is_not_listed_is_refused_and_nothing_is_imported(
    type_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_evil.py").write_text("raise SystemExit('this module was imported')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    with pytest.raises(Unsupported, match=r"which is not registered: pass types="):
        Types().find(type_id)

    assert set(sys.modules) == before
    assert import_known(type_id) is None


def test_a_class_that_the_user_registers_counts_more_than_a_listed_one(planted: Callable[[type], None]) -> None:
    planted(make_pair_class())
    own = make_pair_class()
    own.__module__, own.__qualname__ = MODULE, NAME

    assert Types([own]).find(LISTED) is own


# With the real library


@pytest.fixture
def torchao() -> Any:
    """The real torchao; what it warns of while it is imported is its own affair."""
    return pytest.importorskip("torchao")


REAL = pytest.mark.filterwarnings("ignore")


def collect_bytes(value: object) -> list[bytes]:
    """Return the bytes of all parts of a tensor, in order."""
    assert isinstance(value, torch.Tensor)
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return [value.detach().contiguous().view(torch.uint8).numpy().tobytes()]
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]  # only subclasses have it
    return [data for name in names for data in collect_bytes(getattr(value, name))]


def save_and_load(tensor: torch.Tensor) -> None:
    """Save a tensor, load it in a store that knows no class, and compare class, context and bytes."""
    store = Store(MemoryStore())
    store.save("a", {"w": tensor})

    loaded = Store(store.repository.store).load("a")["w"]

    assert type(loaded) is type(tensor)
    assert repr(loaded.__tensor_flatten__()) == repr(tensor.__tensor_flatten__())  # type: ignore[attr-defined]
    assert collect_bytes(loaded) == collect_bytes(tensor)


@REAL
@pytest.mark.parametrize(
    "name",
    [
        "Int8WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "Float8WeightOnlyConfig",
        "IntxWeightOnlyConfig",
        "Int8DynamicActivationIntxWeightConfig",
    ],
)
def test_weights_that_torchao_quantised_come_back(torchao: Any, name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    quantization.quantize_(model, getattr(quantization, name)())
    if "LinearActivationQuantizedTensor" in type(model[0].weight).__name__:
        pytest.skip("this version of torchao keeps a function in the tensor")

    save_and_load(model.state_dict()["0.weight"])


@REAL
def test_a_quantised_model_is_loaded_in_place(torchao: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    models = [torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=torch.bfloat16)) for _ in range(2)]
    for model in models:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    store = Store(MemoryStore())
    store.save("a", {"model": models[0]})

    store.load_into("a", {"model": models[1]})

    ours, theirs = (model.state_dict()["0.weight"] for model in models)
    assert collect_bytes(ours) == collect_bytes(theirs)


@REAL
@pytest.mark.parametrize(
    "name", ["subclass_8bit:OptimState8bit", "subclass_4bit:OptimState4bit", "subclass_fp8:OptimStateFp8"]
)
def test_states_of_optimizers_with_few_bits_come_back(torchao: Any, name: str) -> None:
    module, _, cls = name.partition(":")
    state = getattr(pytest.importorskip(f"torchao.optim.{module}"), cls)

    save_and_load(state.zeros((64, 256)))


@REAL
def test_every_listed_class_that_this_torchao_has_is_of_its_kind(torchao: Any) -> None:
    found = {type_id: cls for type_id in KNOWN if (cls := import_if_present(type_id)) is not None}

    assert len(found) > 20
    for type_id, cls in found.items():
        assert find_kind(cls) == KNOWN[type_id], type_id
        assert Types().find(type_id) is cls


def import_if_present(type_id: str) -> type | None:
    """Import a listed class; None if this version of its library does not have it."""
    try:
        return import_known(type_id)
    except Unsupported as error:
        if "this version of torchao does not have" not in str(error):
            raise
        return None
