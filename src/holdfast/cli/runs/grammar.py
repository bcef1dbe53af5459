"""The actions of `holdfast run`, their arguments and help pages."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from holdfast.capture.stored.events import KINDS, PHASES
from holdfast.cli.verb import add_json, add_verb

if TYPE_CHECKING:
    from holdfast.cli.verb import Verbs


def add_run(verbs: Verbs) -> None:
    """Add the verb `run`."""
    more = (
        "Runs are recorded by `store.record(...)`. Loads torch. diff, nan, ranks, report\n"
        "and tensor --against exit with 1 if they find a difference, a NaN or an Inf, and\n"
        "with 2 on an error."
    )
    examples = ["holdfast run ls", "holdfast run diff good bad", "holdfast run report good bad diff.html"]
    parser = add_verb(verbs, "run", "list recorded runs, and find where two diverge", more=more, examples=examples)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    for add in (_add_ls, _add_diff, _add_nan, _add_ranks, _add_events, _add_tensor, _add_report):
        add(actions)


def _add_ls(actions: Verbs) -> None:
    add_json(add_verb(actions, "ls", "list runs", examples=["holdfast run ls", "holdfast run ls --json"]))


def _add_steps(parser: ArgumentParser) -> None:
    parser.add_argument("--steps", metavar="STEPS", help="only these steps: 0-9,20 or 100:1000:100")


def _add_comparison(parser: ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a run")
    parser.add_argument("b", metavar="B", help="another run")
    parser.add_argument(
        "--noise", metavar="RUN", help="a repetition of A: differences of about this size count as close"
    )
    parser.add_argument(
        "--reference", metavar="RUN", help="a more exact run to compare A and B with, such as one in float64"
    )
    parser.add_argument(
        "--tolerance", metavar="WHAT", default="table", help="table, exact, or RTOL,ATOL (default: table)"
    )
    parser.add_argument(
        "--map",
        metavar="A=B",
        action="append",
        default=[],
        help="module A is named B in the second run; may be repeated",
    )
    parser.add_argument(
        "--dim",
        metavar="PATTERN=DIM",
        action="append",
        default=[],
        help="how ranks share matching tensors: split along DIM, or replicate, or partial; may be repeated",
    )
    _add_steps(parser)


def _add_diff(actions: Verbs) -> None:
    more = (
        "Names the first tensor that differs although all its inputs are equal: the\n"
        "ORIGIN. A tensor that differs because its inputs do is PROPAGATED, one within\n"
        "the tolerance is CLOSE, one that only one run has is MISSING. Exits with 1 if\n"
        "there is an ORIGIN."
    )
    examples = ["holdfast run diff good bad", "holdfast run diff good bad --noise good-2 --steps 0-9"]
    parser = add_verb(actions, "diff", "find where two runs diverge", more=more, examples=examples)
    _add_comparison(parser)
    parser.add_argument("--all", action="store_true", help="print every line, not only the first 30")
    add_json(parser)


def _add_nan(actions: Verbs) -> None:
    more = (
        "Names the module that made it from finite values, not those that passed it on.\nExits with 1 if there is one."
    )
    parser = add_verb(actions, "nan", "find the first NaN or Inf", more=more, examples=["holdfast run nan bad"])
    parser.add_argument("run", metavar="RUN", help="a run")
    _add_steps(parser)
    add_json(parser)


def _add_ranks(actions: Verbs) -> None:
    more = "Compares parameters, buffers and reduced gradients between ranks. Exits with 1 if\none differs."
    parser = add_verb(
        actions, "ranks", "compare the replicas of a run", more=more, examples=["holdfast run ranks good --steps 3"]
    )
    parser.add_argument("run", metavar="RUN", help="a run")
    _add_steps(parser)
    parser.add_argument("--all", action="store_true", help="print every line, not only the first 30")
    add_json(parser)


def _add_filters(parser: ArgumentParser) -> None:
    parser.add_argument("--step", metavar="N", type=int, help="only this step")
    phases, kinds = ", ".join(PHASES), ", ".join(KINDS)
    parser.add_argument("--phase", metavar="PHASE", choices=PHASES, help=f"only this phase: {phases}")
    parser.add_argument("--kind", metavar="KIND", choices=KINDS, help=f"only this kind: {kinds}")
    parser.add_argument("--rank", metavar="N", type=int, help="only this rank")


def _add_events(actions: Verbs) -> None:
    examples = ["holdfast run events good", "holdfast run events good 'layers.3.*' --step 0 --kind output"]
    parser = add_verb(actions, "events", "list the tensors of a run", examples=examples)
    parser.add_argument("run", metavar="RUN", help="a run")
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", default="*", help="only names that match")
    _add_filters(parser)
    parser.add_argument("--all", action="store_true", help="print every line, not only the first 100")
    add_json(parser)


def _add_tensor(actions: Verbs) -> None:
    more = (
        "--step defaults to the first step that has the tensor. A tensor that was not\n"
        "recorded with level='full' has no values; its statistics are shown if there are\n"
        "any."
    )
    examples = [
        "holdfast run tensor good layers.3.mlp --kind output --step 3",
        "holdfast run tensor good layers.3.mlp --kind output --step 3 --against bad",
    ]
    parser = add_verb(actions, "tensor", "print a tensor and its histogram", more=more, examples=examples)
    parser.add_argument("run", metavar="RUN", help="a run")
    parser.add_argument("name", metavar="NAME", help="the name, as `holdfast run events` lists it")
    _add_filters(parser)
    parser.add_argument("--call", metavar="N", type=int, help="only this call of the module within the step")
    parser.add_argument("--path", metavar="PATH", help="only this argument or result, such as [1]")
    parser.add_argument("--against", metavar="RUN", help="compare with the same tensor of this run")
    parser.add_argument("--bins", metavar="N", type=int, default=20, help="lines of the histogram (default: 20)")
    add_json(parser)


def _add_report(actions: Verbs) -> None:
    more = (
        "One HTML file that needs no network: the differences, plots over steps and\n"
        "within a step, and every tensor with its histogram. Compares as diff does, with\n"
        "the same exit codes."
    )
    examples = ["holdfast run report good bad diff.html"]
    parser = add_verb(actions, "report", "write an HTML report on where two runs diverge", more=more, examples=examples)
    _add_comparison(parser)
    parser.add_argument("file", metavar="FILE", help="the HTML file; replaced if it exists")
    parser.add_argument("--rows", metavar="N", type=int, default=50_000, help="write at most N rows (default: 50000)")
