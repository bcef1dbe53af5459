"""The verb `bisect`: runs a command for snapshots of a series, and finds the first for which it fails."""

from __future__ import annotations

import re
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Final

from holdfast.cli.lookup import list_chosen, open_to_read
from holdfast.cli.output import Output, count
from holdfast.cli.verb import add_json, add_query, document
from holdfast.cli.verbs.names import print_damage
from holdfast.errors import NotBisectable
from holdfast.json_text import Json
from holdfast.query.bisect import Bisection, bisect, order_series
from holdfast.query.facts import Facts, split_damaged
from holdfast.query.select import parse_query, read_facts, select
from holdfast.texts import list_some

SKIP: Final = 125
"""Exit code of a command that cannot test a snapshot, as for `git bisect run`."""
_LAST_BAD: Final = 127
_STANDARD_ERROR: Final = 2
_PLACES: Final = re.compile(r"\{(?:name)?\}")


def declare_bisect(parser: ArgumentParser) -> None:
    """Declare the verb `bisect`."""
    more = (
        "The command is run for the first and the last snapshot, then for one in the\n"
        "middle of what is left. Exit code 0 means good, 1 to 127 bad, and 125 skips the\n"
        "snapshot; any other ends the search. In the command, {} and {name} are replaced\n"
        "by the name of the snapshot; it also has $HOLDFAST_SNAPSHOT and $HOLDFAST_STORE.\n"
        "The series is in the order of steps if each snapshot has another step, else of\n"
        "commit times. If a snapshot is bad, those after it must be bad too."
    )
    examples = [
        "holdfast bisect run1/ -- python evaluate.py {}",
        "holdfast bisect run1/ --where 'step >= 1000' -- ./test-it {name}",
    ]
    document(parser, more, examples=examples)
    parser.add_argument("prefix", metavar="PREFIX", help="the snapshots to search: a prefix, or a glob")
    parser.usage = "holdfast bisect [-h] [--where EXPR] [--json] PREFIX -- COMMAND [ARG ...]"
    add_query(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run_bisect)


def run_bisect(options: Namespace, url: str, output: Output) -> int:
    """Find the first snapshot for which a command fails."""
    if not options.command:
        raise NotBisectable("bisect needs a command after two dashes: holdfast bisect PREFIX -- COMMAND")
    query = parse_query(where=options.where)
    repo = open_to_read(url, output)
    snapshots, damaged = split_damaged(list_chosen(repo, options.prefix, options.cache_folder))
    print_damage(damaged, output)
    series, order = order_series(select(read_facts(repo.store, snapshots, query), query))
    probe = _Probe(
        store_url=repo.store.url,
        command=options.command,
        variables=options.variables,
        output=output,
        as_json=options.json,
    )
    if len(series) > 1 and not options.json:
        tests = 2 + ceil(log2(len(series)))
        output.line(f"bisecting {len(series)} snapshots in the order of their {order}s: about {count(tests, 'test')}")
    found = bisect(series, probe.run, label=lambda facts: facts.snapshot.name, prefix=options.prefix)
    if options.json:
        output.json(_describe(found, len(series), order))
    else:
        _print_found(found, len(series), output)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """Runs the command for one snapshot after the other."""

    store_url: str
    command: Sequence[str]
    variables: Mapping[str, str]
    output: Output
    as_json: bool

    def run(self, facts: Facts) -> bool | None:
        """Run the command for a snapshot; return True for good, False for bad, None if it is to be skipped."""
        name = facts.snapshot.name
        code = self._run_command(name)
        if not 0 <= code <= _LAST_BAD:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise NotBisectable(f"the command {how} for {name!r}, which ends the search; 125 would skip the snapshot")
        verdict = None if code == SKIP else code == 0
        if not self.as_json:
            word = "skipped" if verdict is None else "good" if verdict else "bad"
            self.output.line(f"{name}: {word} (exit code {code})")
        return verdict

    def _run_command(self, name: str) -> int:
        command = [_fill_in(word, name) for word in self.command]
        variables = {**self.variables, "HOLDFAST_SNAPSHOT": name, "HOLDFAST_STORE": self.store_url}
        self.output.flush()
        # With --json, standard output has the JSON and nothing else.
        stdout = _STANDARD_ERROR if self.as_json else None
        try:
            return subprocess.run(command, env=variables, stdout=stdout, check=False).returncode
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise NotBisectable(f"the command {command[0]!r} cannot be run: {reason}") from error


def _fill_in(word: str, name: str) -> str:
    # In one pass: the name itself may contain braces.
    return _PLACES.sub(lambda _: name, word)


def _print_found(found: Bisection[Facts], length: int, output: Output) -> None:
    names = [facts.snapshot.name for facts in found.candidates]
    if len(names) == 1:
        output.line(f"first bad: {names[0]}")
    else:
        output.line(f"first bad: {names[-1]}, or one that was skipped before it: {list_some(names[:-1], 10)}")
    output.line(f"last good: {found.last_good.snapshot.name}")
    output.line(f"tested {len(found.tried)} of {count(length, 'snapshot')}, skipped {len(found.skipped)}")


def _describe(found: Bisection[Facts], length: int, order: str) -> dict[str, Json]:
    return {
        "first_bad": found.first_bad.snapshot.name,
        "last_good": found.last_good.snapshot.name,
        "candidates": [facts.snapshot.name for facts in found.candidates],
        "tried": [facts.snapshot.name for facts in found.tried],
        "skipped": [facts.snapshot.name for facts in found.skipped],
        "snapshots": length,
        "order": order,
    }
