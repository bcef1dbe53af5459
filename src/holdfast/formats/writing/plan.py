"""Plans an export: which tensors of a snapshot it writes, under which names, and what it leaves out."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.errors import NotFound, Unsupported
from holdfast.formats.receipt import LeftOut
from holdfast.formats.writing.snapshot_tensor import SnapshotTensor
from holdfast.json_text import Json
from holdfast.snapshot.leaves import GRAD, PARTS, TENSOR, describe_node
from holdfast.snapshot.opened import Opened
from holdfast.tensors.spec import SpecDecoder
from holdfast.texts import list_some
from holdfast.trees.outline import Leaf, has_children, iter_children, iter_leaves, key_text
from holdfast.trees.pick import matches, pick

_NAMED: Final = 5
"""How many tensors an error names."""
ROOT_NAME: Final = "value"
"""The name of a tensor that is the whole tree; its entry has the same name."""


@dataclass(frozen=True, slots=True)
class SelectedTree:
    """The part of a snapshot's tree that an export writes."""

    node: Json
    prefix: str = ""
    """The name of the part in the snapshot; exported names do not have it."""

    def join(self, name: str) -> str:
        """Return the name in the snapshot of a leaf of this part."""
        return ".".join(part for part in (self.prefix, name) if part) or ROOT_NAME

    def find_own_name(self, name: str) -> str:
        """Return the name that a leaf of this part has in the exported files."""
        return name or self.prefix.rpartition(".")[2] or ROOT_NAME


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to be exported."""

    tensor: SnapshotTensor
    name_in_files: str
    tie: Hashable
    """Equal for tensors that are the same memory with the same shape and strides, and for no others."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The tensors to be exported, by their names in the files, and what is left out."""

    tensors: dict[str, PlannedTensor] = field(default_factory=dict)
    others: list[Leaf] = field(default_factory=list)
    """Leaves that are not tensors, in order."""
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """The number of bytes of all tensors."""
        return sum(each.tensor.size_bytes for each in self.tensors.values())


def select_tree(opened: Opened, prefix: str, exclude: Sequence[str]) -> SelectedTree:
    """Return the tree below a name, without the leaves that match a pattern; raises NotFound if nothing is left."""
    node = opened.tree
    if prefix:
        leaves = opened.find(prefix).leaves
        below = _find_node(node, prefix)
        # Keys may contain dots, so that a name which leaves have in common need not be that of a container.
        node = _make_dict(prefix, leaves) if below is None else below
    tree = SelectedTree(node, prefix)
    if exclude:
        patterns = list(exclude)
        tree = SelectedTree(pick(node, lambda name: not matches(tree.join(name), patterns)), prefix)
    if tree.node is None:
        raise NotFound(f"nothing of {opened.name!r} is left to export; exclude less")
    return tree


def _find_node(node: Json, prefix: str) -> Json:
    for key, child in iter_children(node) if has_children(node) else ():
        text = key_text(key)
        if text == prefix:
            return child
        found = _find_node(child, prefix[len(text) + 1 :]) if prefix.startswith(text + ".") else None
        if found is not None:
            return found
    return None


def _make_dict(prefix: str, leaves: Sequence[Leaf]) -> Json:
    node: list[Json] = ["dict"]
    for leaf in leaves:
        node += [leaf.name.removeprefix(prefix + "."), leaf.node]
    return node


def plan_tensors(opened: Opened, tree: SelectedTree) -> TensorPlan:
    """List the tensors of a tree and everything else; raises Unsupported for a tensor that no file format has."""
    plan, decoder = TensorPlan(), SpecDecoder(opened.name)
    refused: list[str] = []
    for leaf in iter_leaves(tree.node):
        name = tree.join(leaf.name)
        node = leaf.node
        if leaf.tag == GRAD:
            plan.left_out.append(LeftOut(f"{name}.grad", "a gradient: exports contain the values of tensors only"))
            node = leaf.node[1]
        if node and isinstance(node, list) and node[0] == TENSOR:
            planned = _plan_tensor(opened, decoder, tree, leaf.name, node)
            refused += [f"{name} ({why})" for why in _iter_refusals(planned.tensor)]
            if plan.tensors.setdefault(planned.name_in_files, planned) is not planned:
                raise _collision(planned, plan.tensors[planned.name_in_files])
        elif leaf.tag in (GRAD, PARTS):
            refused.append(f"{name} ({describe_node(node)})")
        else:
            plan.others.append(leaf)
    if refused:
        raise Unsupported(
            f"no file format of other libraries has these tensors: {list_some(refused, _NAMED)}; leave them out"
            " (--exclude, exclude=), or keep them in a store"
        )
    return plan


def _plan_tensor(
    opened: Opened, decoder: SpecDecoder, tree: SelectedTree, name: str, node: list[Json]
) -> PlannedTensor:
    saved, size_bytes, alias = opened.find_facts(node[1])
    spec = decoder.decode(saved, size_bytes=size_bytes, name=tree.join(name))
    place = 0 if spec.packed else spec.at + spec.offset * spec.dtype.itemsize
    geometry = (place, spec.dtype, spec.shape, spec.stride, spec.conj, spec.neg)
    tie = (alias, geometry) if alias else node[1]
    return PlannedTensor(SnapshotTensor(tree.join(name), node[1], spec), tree.find_own_name(name), tie)


def _iter_refusals(tensor: SnapshotTensor) -> Iterator[str]:
    if tensor.spec.meta:
        yield "on the meta device, without values"
    elif tensor.spec.quantizer is not None:
        yield "quantised"


def _collision(one: PlannedTensor, other: PlannedTensor) -> Unsupported:
    return Unsupported(
        f"{one.tensor.name} and {other.tensor.name} would both be called {one.name_in_files!r} in the files;"
        " rename one of them, or leave one out (--exclude, exclude=)"
    )


def leave_out_others(plan: TensorPlan, tree: SelectedTree, what: str) -> list[LeftOut]:
    """Return everything that is left out by a format that has tensors only."""
    others = [
        LeftOut(tree.join(leaf.name), f"{describe_node(leaf.node)}: {what} contains tensors only")
        for leaf in plan.others
    ]
    return [*plan.left_out, *others]
