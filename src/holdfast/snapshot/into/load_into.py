"""Loading in place: list everything that does not match, then read bytes directly into existing memory."""

from __future__ import annotations

from typing import Any

from holdfast.json_text import Json
from holdfast.snapshot.into.apply_plan import Loading, verify_fits
from holdfast.snapshot.into.changes import iter_contents
from holdfast.snapshot.into.in_place import find_conflicts
from holdfast.snapshot.into.journal import Journal
from holdfast.snapshot.into.match import FIXED, TreeMatcher
from holdfast.snapshot.into.plan import Check, ImmutableCheck, IntoOptions, IntoPlan
from holdfast.snapshot.into.undo import FieldSetter
from holdfast.snapshot.leaves import ARRAY
from holdfast.snapshot.load.load import LeafReader, load_node
from holdfast.snapshot.load.opened import Opened
from holdfast.snapshot.load.options import LoadOptions
from holdfast.tensors.spec import SpecDecoder
from holdfast.trees.encoding import decode_tree
from holdfast.trees.outline import TreePath, iter_stored
from holdfast.trees.pick import rename_keys
from holdfast.trees.registered import Types


def load_into(opened: Opened, tree: Any, options: IntoOptions, types: Types, *, journal: Journal | None = None) -> Any:
    """Fill `tree` in place and return it, or the saved value if `tree` is plain; changes nothing unless all matches.

    Any error after the first write, whatever its type, has the attributes `overwritten` and `partly_written`, and says
    the same in its text or in a note.

    Raises:
        Mismatch: keys, shapes or dtypes differ; all of them are listed, and nothing was changed.
        Corrupt: bytes in the store are damaged.
        OutOfMemory: `atomic`, and there is no memory for a second copy; nothing was changed.
    """
    journal = journal or Journal()
    with opened.pausing_gc():
        plan = match_tree(opened, tree, options, types)
        check_values(plan)
        verify_fits(plan)
        with journal.reporting(), Loading(plan, journal) as loading:
            loading.read()
            loading.put()
            loading.settle()
            note_held(plan)
    return plan.result


def match_tree(opened: Opened, tree: Any, options: IntoOptions, types: Types) -> IntoPlan:
    """Return the plan of a load into `tree`; what does not match is in its `problems`."""
    plan = IntoPlan(opened, options, types, SpecDecoder(opened.name), result=tree)
    node = rename_keys(opened.tree, options.rename) if options.rename else opened.tree
    TreeMatcher(plan).match(tree, node, (), FieldSetter(plan, "result"))
    return plan


def check_values(plan: IntoPlan) -> None:
    """Read the values that decide whether the tree matches, and add what does not match; needs the chunks of these."""
    for fixed in plan.immutable_checks:
        _check_immutable(plan, fixed)
    for check in plan.checks:
        _run_check(plan, check)
    _resolve_conflicts(plan)


def note_held(plan: IntoPlan) -> None:
    """Let the handle remember what the target holds after the plan was carried out, if that was verified."""
    if plan.options.held is not None and plan.options.verify in ("full", "device"):
        plan.options.held.note(iter_contents(plan))


def _check_immutable(plan: IntoPlan, check: ImmutableCheck) -> None:
    """Read the saved value of a target that cannot be changed, and add a problem if the two differ."""
    target = check.target
    saved = load_node(plan.opened, check.node, LoadOptions(), plan.types)
    if check.node[0] != ARRAY:
        is_same = type(saved) is type(target) and bool(saved == target)
    else:
        is_alike = (saved.dtype, saved.shape) == (target.dtype, target.shape)
        is_same = is_alike and bool(saved.tobytes() == target.tobytes())
    if not is_same:
        plan.add_problem(check.path, FIXED)


def _run_check(plan: IntoPlan, check: Check) -> None:
    """Read a value of a foreign format, and add what does not match."""
    reader = LeafReader(plan.opened, plan.types, LoadOptions(allow_pickle=plan.options.allow_pickle))
    reader.read(iter_stored(check.node))

    def decode(node: list[Json], path: TreePath) -> object:
        return reader.decode(node, (*check.path, *path))

    saved = decode_tree(check.node, types=plan.types, decode_leaf=decode)
    for text in check.find_problems(saved):
        plan.add_problem(check.path, text)


def _resolve_conflicts(plan: IntoPlan) -> None:
    """Refuse different values for the same memory; where new memory can be used instead, use it."""
    for first, second in find_conflicts(plan.claims):
        spare = second if second.number is not None else first
        if spare.number is not None:
            plan.in_place.pop(spare.number, None)
            plan.names.pop(spare.number, None)
        elif first.geometry == second.geometry:
            text = f"the target shares its memory with {first.name}, and the snapshot has different values for them"
            plan.problems.append(f"{second.name}: {text}")
        else:
            text = (
                f"the target shares memory with {first.name}, and the snapshot keeps them separate; clone() one of them"
            )
            plan.problems.append(f"{second.name}: {text}")
    plan.claims.clear()  # not needed any more, and there may be very many
