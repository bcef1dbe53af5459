"""The verb `follow`: prints snapshots as they are committed."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from holdfast.cli.lookup import open_to_read, read_named_snapshot
from holdfast.cli.output import Output, format_time
from holdfast.cli.verb import add_json, document
from holdfast.cli.verbs.names import label_tags
from holdfast.digest import short_hex
from holdfast.query.facts import describe_snapshot
from holdfast.repo.names.latest import NameWaiter, NameWatch
from holdfast.repo.names.snapshots import Tag, iter_tags
from holdfast.texts import format_bytes, parse_duration


def declare_follow(parser: ArgumentParser) -> None:
    """Declare the verb `follow`."""
    more = (
        "Print the newest snapshot whose name begins with PREFIX, and again each time\n"
        "there is a newer one. Those in between are skipped, unless --every is given.\n"
        "Ends with Ctrl-C, or with --timeout. With --json, each line is a JSON object."
    )
    examples = ["holdfast follow policy/", "holdfast follow policy/ --since policy/00000041 --json"]
    document(parser, more, examples=examples)
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="the start of the names")
    parser.add_argument("--since", metavar="NAME", help="print only snapshots newer than NAME")
    parser.add_argument("--every", action="store_true", help="print every new snapshot, not only the newest")
    parser.add_argument("--poll", metavar="AGE", help="the longest pause between two looks, such as 5s")
    parser.add_argument("--timeout", metavar="AGE", help="end after this time without a new snapshot, such as 10m")
    add_json(parser, "print a line of JSON for each snapshot")
    parser.set_defaults(run_verb=run_follow)


def run_follow(options: Namespace, url: str, output: Output) -> int:
    """Print snapshots until the time is up."""
    poll_s, timeout_s = (None if text is None else parse_duration(text) for text in (options.poll, options.timeout))
    repo = open_to_read(url, output)
    since = read_named_snapshot(repo.store, options.since, output) if options.since else None
    watch = NameWatch(repo.store, options.prefix, repo.records, since=since, every=options.every)
    waiter = NameWaiter(repo.store, watch, poll_s=poll_s, timeout_s=timeout_s)
    while found := waiter.wait():
        tags = [tag for tag in iter_tags(repo.store) if isinstance(tag, Tag)]
        if options.json:
            output.json_line(describe_snapshot(found, tags))
        else:
            facts = (format_time(found.time_s), short_hex(found.digest), format_bytes(found.logical_bytes))
            output.line("  ".join(filter(None, (found.name, *facts, label_tags(found, tags)))))
            output.flush()
    return 0
