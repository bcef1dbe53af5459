"""The grammar of `holdfast run`: its actions, their arguments, and what their pages of help say."""

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
        "Runs are recorded by `store.record(...)`. Loads torch. diff, nan, ranks,\n"
        "report and tensor --against exit with 1 if there is something to see, 2 on an\n"
        "error."
    )
    examples = ["holdfast run ls", "holdfast run diff good bad", "holdfast run report good bad diff.html"]
    parser = add_verb(verbs, "run", "list recorded runs, and find where two diverge", more=more, examples=examples)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    for add in (_add_ls, _add_diff, _add_nan, _add_ranks, _add_events, _add_tensor, _add_report):
        add(actions)


def _add_ls(actions: Verbs) -> None:
    add_json(add_verb(actions, "ls", "list runs", examples=["holdfast run ls", "holdfast run ls --json"]))


def _add_steps(parser: ArgumentParser) -> None:
    parser.add_argument("--steps", metavar="STEPS", help="only these: 0-9,20 or 100:1000:100")


def _add_comparison(parser: ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a run")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--noise", metavar="RUN", help="a repetition of A: no farther apart than these is close")
    parser.add_argument("--reference", metavar="RUN", help="a run that both are measured by, such as one in float64")
    parser.add_argument(
        "--tolerance", metavar="WHAT", default="table", help="table, exact, or RTOL,ATOL (default: table)"
    )
    parser.add_argument(
        "--map", metavar="A=B", action="append", default=[], help="module A is called B in the second; may be repeated"
    )
    parser.add_argument(
        "--dim",
        metavar="PATTERN=DIM",
        action="append",
        default=[],
        help="tensors of ranks lie along DIM, or DIM is replicate or partial; may be repeated",
    )
    _add_steps(parser)


def _add_diff(actions: Verbs) -> None:
    more = (
        "Names the first tensor that differs though nothing that it comes from does: the\n"
        "ORIGIN. What differs since its inputs do is PROPAGATED, what is within the\n"
        "tolerance CLOSE, what has no partner MISSING. Exits with 1 if there is an\n"
        "ORIGIN."
    )
    examples = ["holdfast run diff good bad", "holdfast run diff good bad --noise good-2 --steps 0-9"]
    parser = add_verb(actions, "diff", "find where two runs diverge", more=more, examples=examples)
    _add_comparison(parser)
    parser.add_argument("--all", action="store_true", help="print every line, not only the first 30")
    add_json(parser)


def _add_nan(actions: Verbs) -> None:
    more = "Who made it from finite values, not who passed it on. Exits with 1 if there is\none."
    parser = add_verb(actions, "nan", "find the first NaN or Inf", more=more, examples=["holdfast run nan bad"])
    parser.add_argument("run", metavar="RUN", help="a run")
    _add_steps(parser)
    add_json(parser)


def _add_ranks(actions: Verbs) -> None:
    more = "Parameters, buffers, reduced gradients. Exits with 1 if one differs between\nranks."
    parser = add_verb(actions, "ranks", "compare replicas", more=more, examples=["holdfast run ranks good --steps 3"])
    parser.add_argument("run", metavar="RUN", help="a run")
    _add_steps(parser)
    parser.add_argument("--all", action="store_true", help="print every line, not only the first 30")
    add_json(parser)


def _add_place(parser: ArgumentParser) -> None:
    parser.add_argument("--step", metavar="N", type=int, help="only of this step")
    phases, kinds = ", ".join(PHASES), ", ".join(KINDS)
    parser.add_argument("--phase", metavar="PHASE", choices=PHASES, help=f"only of this phase: {phases}")
    parser.add_argument("--kind", metavar="KIND", choices=KINDS, help=f"only of this kind: {kinds}")
    parser.add_argument("--rank", metavar="N", type=int, help="only of this rank")


def _add_events(actions: Verbs) -> None:
    examples = ["holdfast run events good", "holdfast run events good 'layers.3.*' --step 0 --kind output"]
    parser = add_verb(actions, "events", "list the tensors of a run", examples=examples)
    parser.add_argument("run", metavar="RUN", help="a run")
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", default="*", help="only names that fit")
    _add_place(parser)
    parser.add_argument("--all", action="store_true", help="print every line, not only the first 100")
    add_json(parser)


def _add_tensor(actions: Verbs) -> None:
    more = (
        "Without --step it is the first step that has it. What was not recorded with\n"
        "level='full' has no values; its statistics are shown if there are any."
    )
    examples = [
        "holdfast run tensor good layers.3.mlp --kind output --step 3",
        "holdfast run tensor good layers.3.mlp --kind output --step 3 --against bad",
    ]
    parser = add_verb(actions, "tensor", "print a tensor and its histogram", more=more, examples=examples)
    parser.add_argument("run", metavar="RUN", help="a run")
    parser.add_argument("name", metavar="NAME", help="the name, as `holdfast run events` lists it")
    _add_place(parser)
    parser.add_argument("--call", metavar="N", type=int, help="only of this call of the module in a step")
    parser.add_argument("--path", metavar="PATH", help="only this part of the arguments or results, such as [1]")
    parser.add_argument("--against", metavar="RUN", help="compare it with the same of this run")
    parser.add_argument("--bins", metavar="N", type=int, default=20, help="lines of the histogram (default: 20)")
    add_json(parser)


def _add_report(actions: Verbs) -> None:
    more = (
        "One HTML file that needs no network: what differs, plots over steps and through\n"
        "a step, every tensor with its histogram. Compares as diff does, and exits so."
    )
    examples = ["holdfast run report good bad diff.html"]
    parser = add_verb(actions, "report", "write an HTML report on where two runs diverge", more=more, examples=examples)
    _add_comparison(parser)
    parser.add_argument("file", metavar="FILE", help="where to; replaced if it is there")
    parser.add_argument("--rows", metavar="N", type=int, default=50_000, help="at most so many (default: 50000)")
