"""Loading into what is there: everything that does not fit is listed first, then bytes go straight into place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from holdfast.errors import Corrupt, Mismatch, Unsupported
from holdfast.repo.manifest import Manifest
from holdfast.repo.record import Json
from holdfast.snapshot.entries import InPlace
from holdfast.snapshot.into_plan import Check, IntoOptions, IntoPlan, Look, Wants
from holdfast.snapshot.leaves import ARRAY, PICKLE
from holdfast.snapshot.load import LeafReader, load_node
from holdfast.snapshot.match import FIXED, TreeMatcher
from holdfast.snapshot.match_state import match_state
from holdfast.snapshot.opened import Opened
from holdfast.snapshot.options import LoadOptions
from holdfast.snapshot.places import find_conflicts, mark_written
from holdfast.snapshot.setters import Setter
from holdfast.tensors.spec import Specs
from holdfast.trees.encoding import decode_tree
from holdfast.trees.outline import Path, iter_stored
from holdfast.trees.pick import rename_keys
from holdfast.trees.registered import Types

_LISTED: Final = 50
"""How many problems an error names before it only counts them."""


class Exchange(Protocol):
    """How ranks that want the same read it once."""

    def choose(self, places: Mapping[int, InPlace], /) -> Collection[int]:
        """Return the entries that others read for this rank."""

    def send(self) -> None:
        """Fill those, when all ranks have read what is theirs."""


def load_into(
    opened: Opened,
    tree: Any,
    options: IntoOptions,
    types: Types,
    *,
    agree: Callable[[Sequence[str]], None] = lambda problems: None,
    step: Callable[[Callable[[], None]], object] = lambda act: act(),
    locate: Callable[[Wants], Manifest] | None = None,
    exchange: Exchange | None = None,
) -> Any:
    """Fill `tree` in place and return it, or the value that was saved if it is one; nothing changes unless all fits.

    With several ranks, `agree` raises if something does not fit on another, and `step` is what they read in together.
    With `locate`, what was opened has no chunks; it returns a manifest with those of what is wanted.

    Raises:
        Mismatch: keys, shapes or dtypes differ; all of them are listed, and nothing was changed.
        Corrupt: bytes in the store are damaged; the text says which leaves were overwritten before that was found.
    """
    plan = IntoPlan(opened, options, types, Specs(opened.name))
    root = [tree]
    node = rename_keys(opened.tree, options.rename) if options.rename else opened.tree
    with opened.resting():
        TreeMatcher(plan, match_state).match(tree, node, (), Setter(root, 0))
        if locate is not None:
            plan.relocate(locate(plan.list_wants()))
        for look in plan.looks:
            _check_look(plan, look)
        for check in plan.checks:
            _run_check(plan, check)
        _resolve_conflicts(plan)
        agree(plan.problems)
        _verify_fits(plan)
        left_out = exchange.choose(plan.in_place) if exchange else ()
        loading = _Loading(plan)
        if exchange is None:
            step(lambda: loading.apply(left_out))
        else:
            step(lambda: loading.read(left_out))
            exchange.send()
            step(loading.put)
    return root[0]


def _check_look(plan: IntoPlan, look: Look) -> None:
    """Read what was saved for a value that cannot be changed, and add the problem if it is not that value."""
    target = look.target
    saved = load_node(plan.opened, look.node, LoadOptions(), plan.types)
    if look.node[0] != ARRAY:
        is_same = type(saved) is type(target) and bool(saved == target)
    else:
        is_alike = (saved.dtype, saved.shape) == (target.dtype, target.shape)
        is_same = is_alike and bool(saved.tobytes() == target.tobytes())
    if not is_same:
        plan.add_problem(look.path, FIXED)


def _run_check(plan: IntoPlan, check: Check) -> None:
    """Read what somebody else's format holds, and add what does not fit of it."""
    reader = LeafReader(plan.opened, plan.types, LoadOptions(allow_pickle=plan.options.allow_pickle))
    reader.read(iter_stored(check.node))

    def decode(node: list[Json], path: Path) -> object:
        return reader.decode(node, (*check.path, *path))

    saved = decode_tree(check.node, types=plan.types, decode_leaf=decode)
    for text in check.find_problems(saved):
        plan.add_problem(check.path, text)


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


class _Loading:
    """The doing of a plan: read what needs new memory and decode it, which may still be refused; only then the rest."""

    def __init__(self, plan: IntoPlan) -> None:
        self._plan = plan
        self._acts: list[Callable[[], None]] = []

    def apply(self, left_out: Collection[int]) -> None:
        """Do all of it."""
        self.read(left_out)
        self.put()

    def read(self, left_out: Collection[int]) -> None:
        """Read all, but for what others read for this rank."""
        plan = self._plan
        _verify_pickles(plan)
        options = LoadOptions(allow_pickle=plan.options.allow_pickle)
        reader = LeafReader(plan.opened, plan.types, options, in_place=plan.in_place, devices=plan.devices)
        reader.read(plan.nodes)
        self._acts = [prepare(reader) for prepare in plan.steps]
        _verify_fits(plan)
        with self._overwriting():
            reader.read_in_place(left_out)

    def put(self) -> None:
        """Put what was read into new memory in place, and give objects their state."""
        with self._overwriting():
            for act in self._acts:
                act()

    @contextmanager
    def _overwriting(self) -> Iterator[None]:
        try:
            yield
        except Corrupt as error:
            names = sorted(self._plan.names.values())
            shown = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
            error.args = (f"{error.args[0]}. Overwritten, in part or as a whole, before that was found: {shown}",)
            raise
        finally:
            mark_written([tensor for place in self._plan.in_place.values() for tensor in place.memory])


def _verify_pickles(plan: IntoPlan) -> None:
    for name, node in plan.nodes:
        if node[0] == PICKLE and not plan.options.allow_pickle:
            raise Unsupported(
                f"{plan.opened.name!r}, {name} was pickled: loading it may run any code;"
                " pass allow_pickle=True to allow it. Nothing was changed"
            )
