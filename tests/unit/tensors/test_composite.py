"""Tensors made of others are joined exactly; tensors without bytes are refused with advice."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from holdfast.errors import Corrupt, HoldfastError, NewerFormat, Unsupported
from holdfast.json_text import Json, canonical_json, parse_json
from holdfast.tensors import composite as parts
from holdfast.tensors.composite import TensorParts, join, split, verify_readable
from tests.kit.capabilities import is_able, needs_ability
from tests.kit.tensors import COMPOSITES, ORDINARY, SUBCLASSES, Maker, assert_same_tensor, group_by_kind
from tests.tensor_zoo import Scaled, make_quantised


class Known:
    """The classes of the zoo under their names."""

    def __init__(self, *classes: type) -> None:
        self._classes = {cls.__name__: cls for cls in classes}

    def id_of(self, cls: type) -> str:
        if cls.__name__ not in self._classes:
            raise Unsupported(f"{cls.__name__} is not registered")
        return cls.__name__

    def find(self, type_id: str) -> type:
        if type_id not in self._classes:
            raise Unsupported(f"{type_id} is not registered")
        return self._classes[type_id]


KNOWN = Known(*SUBCLASSES)


def take_apart(tensor: torch.Tensor) -> TensorParts:
    found = split(tensor, types=KNOWN, encode_value=lambda value: ["context", value])
    assert found is not None
    return found


def put_together(
    kind: Json, meta: Json, tensors: Mapping[str, torch.Tensor], *, types: parts.TensorTypes = KNOWN
) -> torch.Tensor:
    return join(kind, meta, tensors, types=types, decode_value=lambda value: value[1])


@contextmanager
def unsupported(text: str) -> Iterator[None]:
    with pytest.raises(Unsupported) as caught:
        yield
    assert text in str(caught.value)


@pytest.mark.parametrize(("kind", "makers"), group_by_kind(COMPOSITES).items())
def test_what_is_taken_apart_is_put_together_the_same(kind: str, makers: list[Maker]) -> None:
    for make in makers:
        tensor = make()
        found = take_apart(tensor)
        assert found.kind == kind
        meta = parse_json(canonical_json(found.meta), where="meta")
        joined = put_together(found.kind, meta, found.tensors)
        assert_same_tensor(joined, make())
        assert_same_tensor(joined, tensor, aliasing=True)
        assert joined.is_leaf


@pytest.mark.parametrize("makers", group_by_kind(ORDINARY).values(), ids=group_by_kind(ORDINARY))
def test_ordinary_tensors_are_not_taken_apart_and_can_be_read(makers: list[Maker]) -> None:
    for make in makers:
        tensor = make()
        assert split(tensor, types=KNOWN, encode_value=repr) is None
        verify_readable(tensor)


def test_the_parts_of_a_tensor_without_gradient_need_none() -> None:
    for name in ("sparse_csr/requires grad", "sparse_coo/requires grad", "nested/parameter", "jagged/parameter"):
        found = take_apart(COMPOSITES[name]())
        assert found.meta["requires_grad"]
        assert not any(part.requires_grad for part in found.tensors.values())


def test_ragged_sizes_that_were_equal_are_equal_again() -> None:
    one = torch.nested.nested_tensor_from_jagged(torch.arange(6.0), torch.tensor([0, 2, 6]))
    found, other = take_apart(one), take_apart(one * 2)
    assert found.tensors["offsets"] is other.tensors["offsets"]
    total = put_together(found.kind, found.meta, found.tensors) + put_together(other.kind, other.meta, other.tensors)
    assert total.values().tolist() == [0, 3, 6, 9, 12, 15]


@needs_ability("make a nested tensor of a part of a storage")
@pytest.mark.filterwarnings("error")
def test_taking_apart_a_nested_tensor_stores_each_byte_once() -> None:
    found = take_apart(COMPOSITES["nested/columns"]())
    assert found.tensors["values"].numel() == 2 * 6 + 4 * 6


def make_fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def make_functional() -> torch.Tensor:
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(torch.ones(2))


class Plain(torch.Tensor):
    """A class that keeps its bytes to itself."""


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "fake": (make_fake, "a fake tensor has no values: save a real one"),
    "functional": (make_functional, "exists only while a function is traced: save it outside of the trace"),
    "functional inside": (lambda: torch._to_functional_tensor(torch.ones(2)), "save it outside of the trace"),
    "uninitialized parameter": (torch.nn.UninitializedParameter, "has no shape yet: run its module once"),
    "uninitialized buffer": (torch.nn.UninitializedBuffer, "has no shape yet: run its module once"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "an mkldnn tensor keeps its bytes in an opaque layout: save its to"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_bytes_is_refused(name: str) -> None:
    make, text = REFUSED[name]
    with unsupported(text):
        split(make(), types=KNOWN, encode_value=repr)
    with unsupported(text):
        verify_readable(make())


def test_a_tensor_inside_of_a_transform_is_refused() -> None:
    def save(tensor: torch.Tensor) -> torch.Tensor:
        with unsupported("inside of vmap, grad or another transform has no bytes: save it outside"):
            verify_readable(tensor)
        return tensor.sum()

    torch.vmap(save)(torch.ones(2, 3))
    torch.func.grad(save)(torch.ones(3))


@pytest.mark.slow  # of importing torch.distributed
@pytest.mark.parametrize("name", parts._REFUSED)
def test_every_class_that_is_refused_by_name_exists(name: str) -> None:
    module, _, short = name.rpartition(".")
    cls: Any = getattr(importlib.import_module(module), short)
    assert f"{cls.__module__}.{cls.__qualname__}" == name
    if issubclass(cls, torch.Tensor):
        tensor = torch.Tensor._make_wrapper_subclass(cls, (2,))
        with unsupported(parts._REFUSED[name]):
            split(tensor, types=Known(cls), encode_value=repr)


def test_a_class_that_does_not_say_what_it_is_made_of_is_refused() -> None:
    with unsupported("class Plain has no __tensor_flatten__ and __tensor_unflatten__, so its tensors cannot be"):
        split(torch.ones(2).as_subclass(Plain), types=Known(Plain), encode_value=repr)


def test_a_class_that_is_not_registered_is_refused() -> None:
    with unsupported("Scaled is not registered"):
        split(COMPOSITES["subclass/whole"](), types=Known(), encode_value=repr)


def test_a_class_that_is_made_of_more_than_tensors_is_refused() -> None:
    tensor: Any = COMPOSITES["subclass/whole"]()
    tensor.scale = 5
    with unsupported("class Scaled has a part that is not a tensor: 'scale' is a <class 'int'>"):
        take_apart(tensor)


def test_a_context_that_cannot_be_encoded_is_not_swallowed() -> None:
    def refuse(value: object) -> Json:
        raise Unsupported("a function cannot be saved")

    with unsupported("a function cannot be saved"):
        split(COMPOSITES["subclass/whole"](), types=KNOWN, encode_value=refuse)


def test_memory_that_was_freed_is_refused() -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with unsupported("the memory of this tensor was freed: it needs 16 bytes, and its storage has 0; save it while"):
        verify_readable(tensor)


def test_memory_that_shrank_is_refused() -> None:
    tensor = torch.ones(4, 4)[1:]
    tensor.untyped_storage().resize_(63)
    with unsupported("it needs 64 bytes, and its storage has 63"):
        verify_readable(tensor)


def test_a_nested_tensor_whose_memory_was_freed_is_refused() -> None:
    tensor = COMPOSITES["nested/whole"]()
    tensor.untyped_storage().resize_(0)
    with unsupported("a row reaches beyond the 0 values. It could not be loaded again: rebuild it"):
        take_apart(tensor)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantised_tensor_that_is_not_what_it_seems_is_refused() -> None:
    with unsupported("a quantised tensor without scale and zero point has no values: quantize it again"):
        verify_readable(torch.empty(3, dtype=torch.qint8))
    with unsupported("a view of a tensor quantised per channel has 4 scales for axis 0 of shape (2, 12): save the"):
        verify_readable(make_quantised(torch.qint8, axis=0).view(2, 12))
    with unsupported("has 4 scales for axis -1 of shape (4,)"):
        verify_readable(make_quantised(torch.qint8, axis=0)[:, 0])


@needs_ability("view a part of a tensor with several items in a byte")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_slice_of_a_tensor_with_several_items_in_a_byte_is_refused() -> None:
    with unsupported("torch starts a slice of a torch.quint4x2 tensor at the wrong item: save the whole"):
        verify_readable(make_quantised(torch.quint4x2)[2:])


@pytest.mark.skipif(
    is_able("make a nested tensor of a part of a storage"), reason="every nested tensor can be loaded with this torch"
)
def test_a_nested_tensor_that_this_torch_cannot_load_is_refused_before_it_is_saved() -> None:
    whole = torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(4, 6)])
    with unsupported(f"torch {torch.__version__} cannot create a nested tensor whose rows do not cover its memory"):
        take_apart(whole.chunk(3, -1)[1])


def test_what_breaks_the_rules_of_its_layout_is_refused_before_it_is_saved() -> None:
    indices, values = torch.tensor([[0, 9]]), torch.ones(2)
    with unsupported(
        "the parts of a sparse_coo tensor do not fit together: size is inconsistent with indices: for dim 0"
    ):
        take_apart(torch.sparse_coo_tensor(indices, values, (3,), check_invariants=False))
    with unsupported(
        "the parts of a jagged tensor do not fit together: a row reaches beyond the 4 items of the ragged dimension"
    ):
        take_apart(torch.nested.nested_tensor_from_jagged(torch.ones(4), torch.tensor([0, 100])))


def saved(name: str, **changes: Json) -> tuple[str, dict[str, Json], dict[str, torch.Tensor]]:
    found = take_apart(COMPOSITES[name]())
    return found.kind, {**found.meta, **changes}, dict(found.tensors)


def test_a_kind_of_a_later_version_asks_for_that_version() -> None:
    with pytest.raises(NewerFormat, match="tensors of kind 'sparse_dia' are not known to this Holdfast: upgrade"):
        put_together("sparse_dia", {}, {})
    kinds: tuple[Json, ...] = (None, ["nested"], {})
    for kind in kinds:
        with pytest.raises(NewerFormat):
            put_together(kind, {}, {})


@pytest.mark.parametrize("role", ["module", "", 5, None, ["tensor"]])
def test_a_role_that_no_tensor_has_is_damage(role: Json) -> None:
    with pytest.raises(Corrupt, match="the parts of a sparse_coo tensor do not fit together: "):
        put_together(*saved("sparse_coo/int64", role=role))


def test_whole_numbers_with_a_gradient_are_damage() -> None:
    for role in ("tensor", "parameter", "buffer"):
        with pytest.raises(Corrupt, match=r"do not fit together: [Oo]nly Tensors of floating point"):
            put_together(*saved("sparse_coo/int64", role=role, requires_grad=True))


def test_a_class_that_this_store_was_not_told_about_is_not_looked_for() -> None:
    with unsupported("os:system is not registered"):
        put_together(*saved("subclass/whole", type="os:system"))


def test_a_class_without_tensors_is_damage() -> None:
    with pytest.raises(Corrupt, match="do not fit together: Known is not the class of a tensor"):
        put_together(*saved("subclass/whole", type="Known"), types=Known(Known))


def test_a_class_that_does_not_accept_its_parts_is_named() -> None:
    class Changed(Scaled):
        @staticmethod
        def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Scaled:
            raise KeyError("zero_point")

    with unsupported("class Scaled did not accept its saved parts: 'scale'; has it changed?"):
        kind, meta, tensors = saved("subclass/whole", parts=["payload"])
        del tensors["scale"]
        put_together(kind, meta, tensors)
    with unsupported("Changed did not accept its saved parts: 'zero_point'; has it changed?"):
        put_together(*saved("subclass/whole", type="Changed"), types=Known(Changed))


def test_a_class_that_makes_something_else_of_its_parts_is_named() -> None:
    class Other(Scaled):
        """Inherits what makes a Scaled."""

    with unsupported("Other built a different tensor from its saved parts: has it changed?"):
        put_together(*saved("subclass/whole", type="Other"), types=Known(Other))
    with unsupported("class Scaled built a different tensor from its saved parts: has it changed?"):
        put_together(*saved("subclass/whole", shape=[3, 2]))


@pytest.mark.parametrize("field", ["type", "parts", "context", "shape", "stride", "role", "requires_grad"])
@pytest.mark.parametrize("value", [None, 5, -1, "x", [], ["x"], [-1], [1 << 70], {}, [["payload", "scale"]], True])
def test_a_hostile_meta_of_a_subclass_raises_nothing_else(field: str, value: Json) -> None:
    kind, meta, tensors = saved("subclass/whole", **{field: value})
    try:
        put_together(kind, {**meta, "context": ["context", {}]}, tensors)
    except HoldfastError:
        return
    assert field in ("context", "stride", "requires_grad")
