"""The grammar of each verb: its arguments, and what its page of help says."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from holdfast.cli.runs.grammar import add_run
from holdfast.cli.verb import add_json as _add_json
from holdfast.cli.verb import add_verb as _add

if TYPE_CHECKING:
    from holdfast.cli.verb import Verbs


def add_verbs(parser: ArgumentParser) -> None:
    """Add every verb, in the order in which help lists them."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for add in (
        _add_init,
        _add_ls,
        _add_show,
        _add_diff,
        _add_put,
        _add_get,
        _add_cat,
        _add_tag,
        _add_rm,
        _add_du,
        _add_prune,
        _add_gc,
        _add_check,
        _add_repair,
        _add_copy,
        _add_cache,
        add_run,
        _add_doctor,
    ):
        add(verbs)


def _add_init(verbs: Verbs) -> None:
    more = (
        "The place must be empty, or not exist yet. Without PATH it is what -s or\n"
        "$HOLDFAST_STORE names, else the current directory."
    )
    parser = _add(verbs, "init", "make a directory a store", more=more, examples=["holdfast init ckpts"])
    parser.add_argument("path", metavar="PATH", nargs="?", help="the directory; made if need be")


def _add_ls(verbs: Verbs) -> None:
    more = "In natural order: step-99 comes before step-100. Exits with 1 if a name is\ndamaged."
    parser = _add(verbs, "ls", "list snapshots", more=more, examples=["holdfast ls", "holdfast ls run1/ --json"])
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that start with this")
    parser.add_argument("-l", "--long", action="store_true", help="whole digests, generations and metadata too")
    _add_json(parser)


def _add_show(verbs: Verbs) -> None:
    more = (
        "NEW is what the save, copy or repack that made this snapshot wrote; the rest was\n"
        "in the store already. INLINE is what lies in the manifest; each snapshot has its\n"
        "own, so it is new. What two leaves share is new for the first.\n"
        "Exits with 1 if a pack is missing."
    )
    examples = [
        "holdfast show run1/step-100",
        "holdfast show run1/step-100 model.weight",
        "holdfast show best --chunks",
    ]
    parser = _add(verbs, "show", "show what a snapshot holds, and in which packs", more=more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("leaf", metavar="LEAF", nargs="?", help="only this leaf, or what lies below this name")
    parser.add_argument("--chunks", action="store_true", help="list every chunk")
    _add_json(parser)


def _add_diff(verbs: Verbs) -> None:
    more = (
        "Lines begin with + for what only B has, - for what only A has, ~ for what both\n"
        "have and differs. Only manifests are read, unless a tensor was cut or laid out\n"
        "in another way. --values reads what differs and says by how much; NaN in the\n"
        "same place on both sides counts as equal. Exits with 1 if there is a difference."
    )
    examples = ["holdfast diff run1/step-100 run1/step-200", "holdfast diff best last --values --only 'model.*'"]
    parser = _add(verbs, "diff", "say what differs between two snapshots", more=more, examples=examples)
    parser.add_argument("a", metavar="A", help="a snapshot or a tag")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--values", action="store_true", help="measure how far values are apart; loads torch")
    parser.add_argument(
        "--only", metavar="PATTERN", action="append", default=[], help="only leaves whose names match; may be repeated"
    )
    parser.add_argument("--all", action="store_true", help="print every line, not only the first 50")
    _add_json(parser)


def _add_put(verbs: Verbs) -> None:
    more = (
        "A file becomes the entry of its name. A directory DIR becomes entries DIR/...;\n"
        "DIR/ and . mean what is in them, without the name. Hidden files are included,\n"
        "empty directories are not kept. A link to a file counts as the file; a link to\n"
        "a directory is refused, unless given as LINK/. Putting the same again under the\n"
        "same name writes nothing."
    )
    examples = ["holdfast put run1/step-100 model.pt config.json", "holdfast put data/v1 corpus/ --meta source=web"]
    parser = _add(verbs, "put", "save files as a snapshot", more=more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="the snapshot's name")
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a file or directory")
    parser.add_argument("--overwrite", action="store_true", help="replace what the name holds, all at once")
    parser.add_argument(
        "--meta", metavar="KEY=VALUE", action="append", default=[], help="keep this text with it; may be repeated"
    )


def _add_get(verbs: Verbs) -> None:
    more = (
        "Every byte is verified before it is written, and a file appears whole or not at\n"
        "all. Files in the way are named, all of them, before anything is written. Links\n"
        "below DIR are never followed. A tensor becomes a file of raw bytes without a\n"
        "header: `holdfast show` tells its dtype and shape. Plain values, such as numbers\n"
        "and short texts, become no files: they are counted and named on standard error,\n"
        "and the exit code is 0."
    )
    examples = ["holdfast get run1/step-100 out", "holdfast get best out --only '*.json'"]
    parser = _add(verbs, "get", "write the entries of a snapshot as files", more=more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("directory", metavar="DIR", help="where to; made if need be")
    parser.add_argument("--only", metavar="GLOB", help="only entries that match; * matches / too")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are in the way")


def _add_cat(verbs: Verbs) -> None:
    more = "Verified piece by piece: no damaged byte is written. With --range only the\nchunks that hold it are read."
    examples = ["holdfast cat run1/step-100 config.json", "holdfast cat run1/step-100 log.txt --range=-1000:"]
    parser = _add(verbs, "cat", "write one entry to standard output", more=more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("entry", metavar="ENTRY", help="the entry's name, as `holdfast show` lists it")
    parser.add_argument("--range", metavar="START:STOP", help="only these bytes; negative ones count from the end")


def _add_tag(verbs: Verbs) -> None:
    more = "Without arguments: list them. With TAG alone: print the snapshot it points to."
    examples = [
        "holdfast tag best run1/step-100",
        "holdfast tag best run1/step-200 --move",
        "holdfast tag --delete best",
    ]
    parser = _add(verbs, "tag", "list, set, move or delete tags", more=more, examples=examples)
    parser.add_argument("tag", metavar="TAG", nargs="?", help="the tag")
    parser.add_argument("snapshot", metavar="NAME", nargs="?", help="the snapshot it shall point to")
    parser.add_argument("--move", action="store_true", help="move the tag if it points elsewhere")
    parser.add_argument("--delete", metavar="TAG", help="delete this tag; the snapshot stays")
    _add_json(parser)


def _add_rm(verbs: Verbs) -> None:
    more = "Prints what would be deleted, and acts only with --yes. A snapshot that a tag\npoints to is refused."
    parser = _add(verbs, "rm", "delete snapshots", more=more, examples=["holdfast rm run1/step-100 --yes"])
    parser.add_argument("names", metavar="NAME", nargs="+", help="a snapshot")
    parser.add_argument("--yes", action="store_true", help="delete; without, only say what would be deleted")


def _add_check(verbs: Verbs) -> None:
    more = "Never writes. Exits with 1 if there is an error or a warning; notes are fine."
    examples = ["holdfast check", "holdfast check --read --json"]
    parser = _add(verbs, "check", "look for damage", more=more, examples=examples)
    parser.add_argument("--read", action="store_true", help="read and verify every byte, not only the structure")
    _add_json(parser)


def _add_doctor(verbs: Verbs) -> None:
    more = (
        "Looks at the filesystem and at the store, and writes nothing. What only a write\n"
        "can tell is tried out with --write: whether two writers can overwrite each\n"
        "other, how fast a write is durable, direct I/O. Works as well on a place where\n"
        "there is no store yet.\n"
        "Exits with 1 if there is a warning or an error."
    )
    examples = ["holdfast doctor", "holdfast doctor --write"]
    parser = _add(verbs, "doctor", "check the store and its filesystem", more=more, examples=examples)
    parser.add_argument(
        "--write", action="store_true", help="try out the filesystem with scratch files there, and remove them"
    )
    _add_json(parser)


def _add_yes(parser: ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="act; without, only say what would be done")


def _add_du(verbs: Verbs) -> None:
    more = (
        "STORED is what a snapshot takes in packs and manifests, SHARED what others use\n"
        "as well, OWN what deleting it can free."
    )
    parser = _add(verbs, "du", "show what takes up space", more=more, examples=["holdfast du", "holdfast du run1/"])
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that start with this")
    _add_json(parser)


def _add_prune(verbs: Verbs) -> None:
    more = (
        "A snapshot stays if any rule keeps it; tagged ones always stay. Prints its plan,\n"
        "and acts only with --yes. Space is freed by `holdfast gc`."
    )
    examples = ["holdfast prune --keep-last 3 run1/", "holdfast prune --keep-every 1000 --keep-within 7d run1/ --yes"]
    parser = _add(verbs, "prune", "delete old snapshots by rule", more=more, examples=examples)
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that start with this")
    parser.add_argument("--keep-last", metavar="N", type=int, default=0, help="keep the newest N")
    parser.add_argument("--keep-every", metavar="N", type=int, default=0, help="keep steps that are multiples of N")
    parser.add_argument("--keep-within", metavar="TIME", help="keep those younger than TIME: 30m, 12h, 7d, 2w")
    _add_yes(parser)
    _add_json(parser)


def _add_gc(verbs: Verbs) -> None:
    more = (
        "Safe beside saves under way. Where nobody is saving, a local store is freed at\n"
        "once; otherwise files are marked and deleted when nobody can be using them, by\n"
        "this run or the next. Prints its plan, and acts only with --yes."
    )
    parser = _add(verbs, "gc", "free space that no snapshot needs", more=more, examples=["holdfast gc --yes"])
    parser.add_argument("--repack", action="store_true", help="also rewrite packs of which most is unused")
    parser.add_argument("--min-age", metavar="TIME", default="1h", help="leave younger files alone (default: 1h)")
    parser.add_argument(
        "--wait", metavar="TIME", default="0s", help="wait at most this long for saves that are running"
    )
    _add_yes(parser)
    _add_json(parser)


def _add_repair(verbs: Verbs) -> None:
    more = (
        "Reads every byte. Rebuilds the index, lists damaged packs as bad, and lets\n"
        "snapshots use other copies in the store. What is lost is named, and never\n"
        "dropped. Prints its plan, and acts only with --yes. Exits with 1 if something is\n"
        "lost."
    )
    parser = _add(verbs, "repair", "repair what can be repaired", more=more, examples=["holdfast repair --yes"])
    _add_yes(parser)
    _add_json(parser)


def _add_copy(verbs: Verbs) -> None:
    more = (
        "Only what is missing there moves, verified on both sides; content, digest,\n"
        "metadata and commit time are kept. A copy that was cut off is simply repeated.\n"
        "A NAME that ends in / means all that begins with it: run1/, or @compiled/ for\n"
        "all compiled graphs, of which one that is there in another form is left alone."
    )
    examples = [
        "holdfast copy run1/step-100 best --to /mnt/backup",
        "holdfast copy @compiled/ --to /media/usb/bundle",
    ]
    parser = _add(verbs, "copy", "copy snapshots to another store", more=more, examples=examples)
    parser.add_argument("names", metavar="NAME", nargs="+", help="a snapshot, a tag, or a prefix that ends in /")
    parser.add_argument("--to", metavar="STORE", required=True, help="the other store; made if need be")
    parser.add_argument("--overwrite", action="store_true", help="replace what the names hold there")
    parser.add_argument("--no-create", action="store_true", help="fail if there is no store at --to, and make none")


def _add_cache(verbs: Verbs) -> None:
    more = (
        "Compiled graphs are kept under @compiled/, a key for each graph and a variant of\n"
        "it for each set of shape guards. KEY is the beginning of a key, as `cache ls`\n"
        "prints it. prune and clear print their plan, and act only with --yes; space is\n"
        "freed by `holdfast gc`."
    )
    examples = ["holdfast cache ls", "holdfast cache prune --max-size 20G --max-age 30d --yes", "holdfast cache why"]
    parser = _add(verbs, "cache", "manage compiled graphs", more=more, examples=examples)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    for add in (_add_cache_ls, _add_cache_show, _add_cache_stat, _add_cache_prune, _add_cache_clear, _add_cache_why):
        add(actions)


def _add_cache_ls(actions: Verbs) -> None:
    more = "The most recently used first. Exits with 1 if one is damaged."
    _add_json(_add(actions, "ls", "list keys", more=more, examples=["holdfast cache ls"]))


def _add_cache_show(actions: Verbs) -> None:
    examples = ["holdfast cache show 3f2a", "holdfast cache show 3f2a --part flags"]
    parser = _add(actions, "show", "show a key and its variants", examples=examples)
    parser.add_argument("key", metavar="KEY", help="the beginning of a key")
    parser.add_argument("--part", metavar="PART", help="print this part of the key: graph, inputs, flags, ...")
    _add_json(parser)


def _add_cache_stat(actions: Verbs) -> None:
    _add_json(_add(actions, "stat", "add up what is there", examples=["holdfast cache stat"]))


def _add_cache_prune(actions: Verbs) -> None:
    more = (
        "Deletes what is damaged, what is over a limit, and keeps the rest. Use is\n"
        "recorded once a day, by processes that may write to the store; what has no\n"
        "record counts from when it was saved."
    )
    examples = ["holdfast cache prune --max-size 20G", "holdfast cache prune --other-systems --yes"]
    parser = _add(actions, "prune", "delete what is over a limit", more=more, examples=examples)
    parser.add_argument("--max-size", metavar="SIZE", help="keep at most this much, the most recently used: 500M, 20G")
    parser.add_argument("--max-age", metavar="TIME", help="delete what was not used for TIME: 12h, 30d, 8w")
    parser.add_argument(
        "--other-systems", action="store_true", help="delete what this machine's torch cannot use; loads torch"
    )
    _add_yes(parser)
    _add_json(parser)


def _add_cache_clear(actions: Verbs) -> None:
    parser = _add(actions, "clear", "delete all compiled graphs", examples=["holdfast cache clear --yes"])
    _add_yes(parser)
    _add_json(parser)


def _add_cache_why(actions: Verbs) -> None:
    more = (
        "Says part by part what differs between two keys, and so why the one was of no\n"
        "use for the other. Without B it is the nearest one; without A, the newest."
    )
    examples = ["holdfast cache why", "holdfast cache why 3f2a", "holdfast cache why 3f2a 9c01"]
    parser = _add(actions, "why", "say why a graph was compiled again", more=more, examples=examples)
    parser.add_argument("a", metavar="A", nargs="?", help="the beginning of a key")
    parser.add_argument("b", metavar="B", nargs="?", help="the beginning of another one")
