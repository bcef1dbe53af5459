"""Loading into what is there: everything that does not fit is listed first, then bytes go straight into place."""

from __future__ import annotations

from typing import Any, Final

from holdfast.errors import Corrupt, Mismatch, Unsupported
from holdfast.snapshot.into_plan import IntoOptions, IntoPlan
from holdfast.snapshot.leaves import PICKLE
from holdfast.snapshot.load import LeafReader
from holdfast.snapshot.match import Setter, TreeMatcher
from holdfast.snapshot.match_state import match_state
from holdfast.snapshot.opened import Opened
from holdfast.snapshot.options import LoadOptions
from holdfast.snapshot.places import find_conflicts, mark_written
from holdfast.tensors.spec import Specs
from holdfast.trees.pick import rename_keys
from holdfast.trees.registered import Types

_LISTED: Final = 50
"""How many problems an error names before it only counts them."""


def load_into(opened: Opened, tree: Any, options: IntoOptions, types: Types) -> Any:
    """Fill `tree` in place and return it, or the value that was saved if it is one; nothing changes unless all fits.

    Raises:
        Mismatch: keys, shapes or dtypes differ; all of them are listed, and nothing was changed.
        Corrupt: bytes in the store are damaged; the text says which leaves were overwritten before that was found.
    """
    plan = IntoPlan(opened, options, types, Specs(opened.name))
    root = [tree]
    node = rename_keys(opened.tree, options.rename) if options.rename else opened.tree
    with opened.resting():
        TreeMatcher(plan, match_state).match(tree, node, (), Setter(root, 0))
        _resolve_conflicts(plan)
        _verify_fits(plan)
        _apply(plan)
    return root[0]


def _resolve_conflicts(plan: IntoPlan) -> None:
    """Refuse different values for one and the same memory; where new memory does as well, take that."""
    for first, second in find_conflicts(plan.claims):
        spare = second if second.number is not None else first
        if spare.number is not None:
            plan.in_place.pop(spare.number, None)
            plan.names.pop(spare.number, None)
        elif first.geometry == second.geometry:
            text = f"the target shares its memory with {first.name}, the snapshot holds different values for them"
            plan.problems.append(f"{second.name}: {text}")
        else:
            text = f"the target shares memory with {first.name}, which the snapshot holds apart; clone() one of them"
            plan.problems.append(f"{second.name}: {text}")


def _verify_fits(plan: IntoPlan) -> None:
    """Raise Mismatch if there are problems."""
    if not plan.problems:
        return
    shown = "\n  ".join(plan.problems[:_LISTED])
    more = f"\n  and {len(plan.problems) - _LISTED} more" if len(plan.problems) > _LISTED else ""
    text = f"{plan.opened.name!r} does not fit; nothing was changed:\n  {shown}{more}"
    raise Mismatch(text, problems=tuple(plan.problems))


def _apply(plan: IntoPlan) -> None:
    """Read what needs new memory and decode it, which may still be refused; only then touch what is there."""
    _verify_pickles(plan)
    options = LoadOptions(allow_pickle=plan.options.allow_pickle)
    reader = LeafReader(plan.opened, plan.types, options, in_place=plan.in_place, devices=plan.devices)
    reader.read(plan.nodes)
    acts = [prepare(reader) for prepare in plan.steps]
    _verify_fits(plan)
    try:
        reader.read_in_place()
        for act in acts:
            act()
    except Corrupt as error:
        names = sorted(plan.names.values())
        shown = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        error.args = (f"{error.args[0]}. Overwritten, in part or as a whole, before that was found: {shown}",)
        raise
    finally:
        mark_written([place.tensor for place in plan.in_place.values()])


def _verify_pickles(plan: IntoPlan) -> None:
    for name, node in plan.nodes:
        if node[0] == PICKLE and not plan.options.allow_pickle:
            raise Unsupported(
                f"{plan.opened.name!r}, {name} was pickled: loading it may run any code;"
                " pass allow_pickle=True to allow it. Nothing was changed"
            )
