"""Modules are filled in place if loading only copies tensors, and loaded by their own method otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from holdfast.errors import Mismatch
from holdfast.store import Store
from tests.kit.loading import bytes_of, noise, problems_of


def places(module: torch.nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in [*module.parameters(), *module.buffers()]]


def hooks(module: torch.nn.Module) -> Any:
    """Return the module; torch does not say the types of these methods."""
    return module


def _blank(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.zero_()
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.BatchNorm2d(4)),
        lambda: torch.nn.LSTM(3, 4, 2),
        lambda: torch.nn.MultiheadAttention(4, 2),
        lambda: torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2)),
        lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 2)),
        lambda: torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.GroupNorm(1, 3)).double(),
        lambda: torch.compile(torch.nn.Linear(2, 2), backend="eager"),
        lambda: torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2)),
    ],
)
def test_modules_are_filled_in_place(store: Store, make: Any) -> None:
    saved, target = make(), _blank(make())
    store.save("x", {"m": saved})
    before = places(target)

    store.load_into("x", {"m": target})

    assert places(target) == before
    assert bytes_of(target) == bytes_of(saved)


def test_batch_norm_goes_on_with_its_statistics(store: Store) -> None:
    saved, target = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    saved(noise(4, 3))
    store.save("x", saved)

    store.load_into("x", target)

    assert target.num_batches_tracked is not None
    assert int(target.num_batches_tracked) == 1
    assert torch.equal(saved.eval()(noise(2, 3)), target.eval()(noise(2, 3)))


def test_tied_parameters_stay_tied(store: Store) -> None:
    def make() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    saved, target = make(), make()
    store.save("x", saved)

    store.load_into("x", target)

    assert target.get_parameter("0.weight") is target.get_parameter("1.weight")
    assert bytes_of(target) == bytes_of(saved)


def test_tied_parameters_that_were_saved_apart_are_refused(store: Store) -> None:
    saved = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    target = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    target[1].weight = target[0].weight

    assert problems_of(store, {"m": saved}, {"m": target}) == [
        "m.1.weight: the target shares its memory with m.0.weight, and the snapshot has different values for them"
    ]


class Recording(torch.nn.Linear):
    """Notes what it is asked to do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls: list[str] = []


class WithExtra(Recording):
    extra = "old"

    def get_extra_state(self) -> dict[str, Any]:
        return {"extra": self.extra, "tensor": torch.ones(2)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls.append("extra")
        self.extra = state["extra"]
        assert state["tensor"].tolist() == [1, 1]


def test_extra_state_is_given_back(store: Store) -> None:
    saved, target = WithExtra(), WithExtra()
    saved.extra = "new"
    store.save("x", saved)
    before = places(target)

    store.load_into("x", target)

    assert (target.extra, target.calls) == ("new", ["extra"])
    assert places(target) == before
    assert torch.equal(target.weight, saved.weight)


class WithMethod(Recording):
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        self.calls.append("method")
        return super().load_state_dict(state_dict, strict, assign)


class WithModuleMethod(Recording):
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.calls.append("module method")
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "old_weight", state_dict.get(prefix + "weight"))
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize(("kind", "call"), [(WithMethod, "method"), (WithModuleMethod, "module method")])
def test_methods_of_its_own_are_called(store: Store, kind: type[Recording], call: str) -> None:
    saved, target = kind(), kind()
    store.save("x", {"m": torch.nn.Sequential(saved) if call == "module method" else saved})

    store.load_into("x", {"m": torch.nn.Sequential(target) if call == "module method" else target})

    assert target.calls == [call]
    assert torch.equal(target.weight, saved.weight)


def test_a_method_that_is_set_on_the_object_is_called(store: Store) -> None:
    store.save("x", torch.nn.Linear(2, 2))
    target = torch.nn.Linear(2, 2)
    given: list[dict[str, Any]] = []
    hooks(target).load_state_dict = given.append

    store.load_into("x", target)

    assert sorted(given[0]) == ["bias", "weight"]


def test_hooks_are_called_and_see_the_values(store: Store) -> None:
    saved, target = Recording(), Recording()
    hooks(target).register_load_state_dict_pre_hook(lambda module, *rest: module.calls.append("before"))
    hooks(target).register_load_state_dict_post_hook(
        lambda module, keys: module.calls.append(torch.equal(module.weight, saved.weight))
    )
    store.save("x", saved)

    store.load_into("x", target)

    assert target.calls == ["before", True]


def test_a_hook_may_translate_keys_and_values(store: Store) -> None:
    weight = noise(2, 2)
    store.save("x", {"old.weight": weight, "bias": noise(2)})
    target = torch.nn.Linear(2, 2)

    def translate(module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "old.weight").t()

    hooks(target).register_load_state_dict_pre_hook(translate)
    before = places(target)

    store.load_into("x", target)

    assert torch.equal(target.weight, weight.t())
    assert places(target) == before


def test_a_hook_may_change_values_under_the_same_key(store: Store) -> None:
    store.save("x", {"weight": noise(2, 2), "bias": noise(2)})
    target = torch.nn.Linear(2, 2)

    def turn(module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t()

    hooks(target).register_load_state_dict_pre_hook(turn)

    store.load_into("x", target)

    assert torch.equal(target.weight, noise(2, 2).t())


def test_what_a_hook_leaves_wrong_is_said_in_the_module_s_words(store: Store) -> None:
    store.save("x", {"m": {"other": noise(2)}})
    target = torch.nn.Linear(2, 2)
    hooks(target).register_load_state_dict_pre_hook(lambda *rest: None)

    with pytest.raises(Mismatch, match=r"(?s)m: Linear refused its state: .*Missing key\(s\) in state_dict"):
        store.load_into("x", {"m": target})


def test_a_hook_does_not_make_a_cast_silent(store: Store) -> None:
    target = torch.nn.Linear(2, 2).double()
    hooks(target).register_load_state_dict_pre_hook(lambda *rest: None)
    saved = torch.nn.Linear(2, 2)

    assert problems_of(store, saved, target)[0] == (
        "weight: torch.float64 in the target, torch.float32 in the snapshot; cast=True converts"
    )
    store.load_into("x", target, cast=True)
    assert torch.equal(target.weight, saved.weight.double())


def test_a_module_whose_state_dict_is_a_copy_is_loaded_through_its_method(store: Store) -> None:
    saved, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def clone(module: torch.nn.Module, state: dict[str, Any], *rest: Any) -> None:
        state.update({key: value.clone() for key, value in state.items()})

    hooks(target).register_state_dict_post_hook(clone)
    store.save("x", saved)

    store.load_into("x", target)

    assert torch.equal(target.weight, saved.weight)


class WithSparse(torch.nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("sparse", value.to_sparse())
        self.sparse: torch.Tensor


def test_a_sparse_buffer_is_loaded(store: Store) -> None:
    store.save("x", WithSparse(torch.tensor([0.0, 2.0, 0.0])))
    target = WithSparse(torch.tensor([1.0, 0.0, 1.0]))

    store.load_into("x", target)

    assert target.sparse.to_dense().tolist() == [0, 2, 0]


def test_a_lazy_module_takes_its_shapes_from_what_was_saved(store: Store) -> None:
    saved = torch.nn.Linear(3, 2)
    store.save("x", saved)
    target = torch.nn.LazyLinear(2)

    store.load_into("x", target)

    assert torch.equal(target.weight, saved.weight)


def test_a_tensor_without_a_shape_cannot_be_filled(store: Store) -> None:
    store.save("x", {"p": noise(2)})

    with pytest.raises(Mismatch, match="p: the tensor in the target is not initialised yet; run its module once"):
        store.load_into("x", {"p": torch.nn.UninitializedParameter()})


def test_cast_converts_what_a_module_holds(store: Store) -> None:
    saved, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).to(torch.bfloat16)
    store.save("x", saved)
    before = places(target)

    store.load_into("x", target, cast=True)

    assert places(target) == before
    assert torch.equal(target.weight, saved.weight.to(torch.bfloat16))


def test_without_strict_a_module_takes_what_fits(store: Store) -> None:
    saved = torch.nn.Linear(2, 2)
    store.save("x", {"weight": saved.weight.detach(), "more": noise(1)})
    target = torch.nn.Linear(2, 2)
    bias = target.bias.tolist()

    store.load_into("x", target, strict=False)

    assert torch.equal(target.weight, saved.weight)
    assert target.bias.tolist() == bias


def test_something_else_in_the_place_of_a_module_is_refused(store: Store) -> None:
    assert problems_of(store, {"m": 5}, {"m": torch.nn.Linear(2, 2)}) == [
        "m: the target has a dict here, the snapshot an int"
    ]
