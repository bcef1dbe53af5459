"""The arguments and help page of each verb."""

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
        "The directory must be empty, or not exist yet. PATH defaults to -s, else to\n"
        "$HOLDFAST_STORE, else to the current directory."
    )
    parser = _add(verbs, "init", "create an empty store", more=more, examples=["holdfast init ckpts"])
    parser.add_argument("path", metavar="PATH", nargs="?", help="the directory; created if it does not exist")


def _add_ls(verbs: Verbs) -> None:
    more = "In natural order: step-99 comes before step-100. Exits with 1 if a snapshot or\na tag is damaged."
    parser = _add(verbs, "ls", "list snapshots", more=more, examples=["holdfast ls", "holdfast ls run1/ --json"])
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that start with this")
    parser.add_argument("-l", "--long", action="store_true", help="also show full digests, generations and metadata")
    _add_json(parser)


def _add_show(verbs: Verbs) -> None:
    more = (
        "NEW counts the bytes that the save, copy or repack of this snapshot wrote; the\n"
        "others were already in the store. INLINE counts bytes stored in the manifest;\n"
        "they are always new, because each snapshot has its own manifest. Bytes that two\n"
        "leaves share count as new for the first. Exits with 1 if a pack is missing."
    )
    examples = [
        "holdfast show run1/step-100",
        "holdfast show run1/step-100 model.weight",
        "holdfast show best --chunks",
    ]
    parser = _add(verbs, "show", "show the contents of a snapshot, and its packs", more=more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("leaf", metavar="LEAF", nargs="?", help="only this leaf, or the leaves below this name")
    parser.add_argument("--chunks", action="store_true", help="list every chunk")
    _add_json(parser)


def _add_diff(verbs: Verbs) -> None:
    more = (
        "A line begins with + for a leaf that only B has, - for one that only A has, ~\n"
        "for one that differs. Only manifests are read, unless a tensor was chunked or\n"
        "laid out differently. --values reads the tensors that differ and measures by how\n"
        "much; NaN at the same index on both sides counts as equal. Exits with 1 if there\n"
        "is a difference."
    )
    examples = ["holdfast diff run1/step-100 run1/step-200", "holdfast diff best last --values --only 'model.*'"]
    parser = _add(verbs, "diff", "show the differences between two snapshots", more=more, examples=examples)
    parser.add_argument("a", metavar="A", help="a snapshot or a tag")
    parser.add_argument("b", metavar="B", help="another snapshot or tag")
    parser.add_argument("--values", action="store_true", help="measure by how much values differ; loads torch")
    parser.add_argument(
        "--only", metavar="PATTERN", action="append", default=[], help="only leaves whose names match; may be repeated"
    )
    parser.add_argument("--all", action="store_true", help="print every line, not only the first 50")
    _add_json(parser)


def _add_put(verbs: Verbs) -> None:
    more = (
        "A file becomes an entry with the name of the file. A directory DIR becomes\n"
        "entries DIR/...; DIR/ and . add the files in them without the directory's name.\n"
        "Hidden files are included, empty directories are not. A link to a file is saved\n"
        "as the file; a link to a directory is refused, unless written as LINK/. Saving\n"
        "the same content again under the same name writes nothing."
    )
    examples = ["holdfast put run1/step-100 model.pt config.json", "holdfast put data/v1 corpus/ --meta source=web"]
    parser = _add(verbs, "put", "save files as a snapshot", more=more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="the snapshot's name")
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a file or directory")
    parser.add_argument("--overwrite", action="store_true", help="replace the content of the name, atomically")
    parser.add_argument(
        "--meta",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="store this text with the snapshot; may be repeated",
    )


def _add_get(verbs: Verbs) -> None:
    more = (
        "Every byte is verified before it is written, and a file appears whole or not at\n"
        "all. If files exist already, all of them are named and nothing is written. Links\n"
        "below DIR are never followed. A tensor becomes a file of raw bytes without a\n"
        "header; `holdfast show` prints its dtype and shape. Plain values, such as\n"
        "numbers and short texts, are not written as files: they are counted and named\n"
        "on standard error, and the exit code is 0."
    )
    examples = ["holdfast get run1/step-100 out", "holdfast get best out --only '*.json'"]
    parser = _add(verbs, "get", "write the entries of a snapshot as files", more=more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("directory", metavar="DIR", help="the target directory; created if it does not exist")
    parser.add_argument("--only", metavar="GLOB", help="only entries that match; * matches / too")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist already")


def _add_cat(verbs: Verbs) -> None:
    more = (
        "Each chunk is verified before it is written, so no damaged byte is. With\n"
        "--range, only the chunks of that range are read."
    )
    examples = ["holdfast cat run1/step-100 config.json", "holdfast cat run1/step-100 log.txt --range=-1000:"]
    parser = _add(verbs, "cat", "write one entry to standard output", more=more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("entry", metavar="ENTRY", help="the entry's name, as `holdfast show` lists it")
    parser.add_argument("--range", metavar="START:STOP", help="only these bytes; negative numbers count from the end")


def _add_tag(verbs: Verbs) -> None:
    more = "Without arguments, list all tags. With TAG only, print its snapshot."
    examples = [
        "holdfast tag best run1/step-100",
        "holdfast tag best run1/step-200 --move",
        "holdfast tag --delete best",
    ]
    parser = _add(verbs, "tag", "list, set, move or delete tags", more=more, examples=examples)
    parser.add_argument("tag", metavar="TAG", nargs="?", help="the tag")
    parser.add_argument("snapshot", metavar="NAME", nargs="?", help="the snapshot that the tag will point to")
    parser.add_argument("--move", action="store_true", help="move the tag if it points to another snapshot")
    parser.add_argument("--delete", metavar="TAG", help="delete this tag; the snapshot is kept")
    _add_json(parser)


def _add_rm(verbs: Verbs) -> None:
    more = "Prints what would be deleted, and deletes only with --yes. Refuses a snapshot\nthat a tag points to."
    parser = _add(verbs, "rm", "delete snapshots", more=more, examples=["holdfast rm run1/step-100 --yes"])
    parser.add_argument("names", metavar="NAME", nargs="+", help="a snapshot")
    parser.add_argument("--yes", action="store_true", help="delete; without it, only print what would be deleted")


def _add_check(verbs: Verbs) -> None:
    more = "Never writes. Exits with 1 if there is an error or a warning, but not for notes."
    examples = ["holdfast check", "holdfast check --read --json"]
    parser = _add(verbs, "check", "check the store for damage", more=more, examples=examples)
    parser.add_argument("--read", action="store_true", help="read and verify every byte, not only the structure")
    _add_json(parser)


def _add_doctor(verbs: Verbs) -> None:
    more = (
        "Checks the filesystem and the store, and writes nothing. Some facts need a test\n"
        "write, which --write does: whether two writers can overwrite each other, how\n"
        "fast a write becomes durable, and whether direct I/O works. Also works for a\n"
        "directory without a store. Exits with 1 if there is a warning or an error."
    )
    examples = ["holdfast doctor", "holdfast doctor --write"]
    parser = _add(verbs, "doctor", "check the store and its filesystem", more=more, examples=examples)
    parser.add_argument("--write", action="store_true", help="test the filesystem with scratch files, and remove them")
    _add_json(parser)


def _add_yes(parser: ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="carry out the plan; without it, only print the plan")


def _add_du(verbs: Verbs) -> None:
    more = (
        "STORED is the size of a snapshot in packs and manifests, SHARED the part that\n"
        "other snapshots also use, OWN the part that deleting the snapshot can free."
    )
    parser = _add(
        verbs, "du", "show the disk usage of snapshots", more=more, examples=["holdfast du", "holdfast du run1/"]
    )
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that start with this")
    _add_json(parser)


def _add_prune(verbs: Verbs) -> None:
    more = (
        "A snapshot is kept if any rule keeps it, or if it has a tag. Prints its plan,\n"
        "and acts only with --yes. `holdfast gc` then frees the space."
    )
    examples = ["holdfast prune --keep-last 3 run1/", "holdfast prune --keep-every 1000 --keep-within 7d run1/ --yes"]
    parser = _add(verbs, "prune", "delete old snapshots by rule", more=more, examples=examples)
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that start with this")
    parser.add_argument("--keep-last", metavar="N", type=int, default=0, help="keep the newest N")
    parser.add_argument("--keep-every", metavar="N", type=int, default=0, help="keep steps that are multiples of N")
    parser.add_argument("--keep-within", metavar="TIME", help="keep snapshots younger than TIME: 30m, 12h, 7d, 2w")
    _add_yes(parser)
    _add_json(parser)


def _add_gc(verbs: Verbs) -> None:
    more = (
        "Safe while other processes save. If no process is saving to a local store, space\n"
        "is freed at once. Otherwise files are marked first, and deleted by this run or a\n"
        "later one when no process can be using them. Prints its plan, and acts only with\n"
        "--yes."
    )
    parser = _add(verbs, "gc", "free space that no snapshot needs", more=more, examples=["holdfast gc --yes"])
    parser.add_argument("--repack", action="store_true", help="also rewrite packs that are mostly unused")
    parser.add_argument(
        "--min-age", metavar="TIME", default="1h", help="keep files that are younger than TIME (default: 1h)"
    )
    parser.add_argument("--wait", metavar="TIME", default="0s", help="wait at most this long for running saves")
    _add_yes(parser)
    _add_json(parser)


def _add_repair(verbs: Verbs) -> None:
    more = (
        "Reads every byte. Rebuilds the index, lists damaged packs as bad, and lets\n"
        "snapshots use other copies in the store. Lost data is reported, and no snapshot\n"
        "is dropped. Prints its plan, and acts only with --yes. Exits with 1 if something\n"
        "is lost."
    )
    parser = _add(verbs, "repair", "repair a damaged store", more=more, examples=["holdfast repair --yes"])
    _add_yes(parser)
    _add_json(parser)


def _add_copy(verbs: Verbs) -> None:
    more = (
        "Copies only chunks that the other store does not have, and verifies them on both\n"
        "sides. Content, digest, metadata and commit time are kept. If a copy is\n"
        "interrupted, run it again. A NAME that ends in / means all snapshots that begin\n"
        "with it: run1/, or @compiled/ for all compiled graphs. A compiled graph that the\n"
        "other store has in another form is not replaced."
    )
    examples = [
        "holdfast copy run1/step-100 best --to /mnt/backup",
        "holdfast copy @compiled/ --to /media/usb/bundle",
    ]
    parser = _add(verbs, "copy", "copy snapshots to another store", more=more, examples=examples)
    parser.add_argument("names", metavar="NAME", nargs="+", help="a snapshot, a tag, or a prefix that ends in /")
    parser.add_argument("--to", metavar="STORE", required=True, help="the other store; created if it does not exist")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the content of these names in the other store"
    )
    parser.add_argument("--no-create", action="store_true", help="fail if there is no store at --to")


def _add_cache(verbs: Verbs) -> None:
    more = (
        "Compiled graphs are stored under @compiled/: one key for each graph, and one\n"
        "variant of the key for each set of shape guards. KEY is the beginning of a key,\n"
        "as `cache ls` prints it. prune and clear print their plan, and act only with\n"
        "--yes; `holdfast gc` then frees the space."
    )
    examples = ["holdfast cache ls", "holdfast cache prune --max-size 20G --max-age 30d --yes", "holdfast cache why"]
    parser = _add(verbs, "cache", "manage compiled graphs", more=more, examples=examples)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    for add in (_add_cache_ls, _add_cache_show, _add_cache_stat, _add_cache_prune, _add_cache_clear, _add_cache_why):
        add(actions)


def _add_cache_ls(actions: Verbs) -> None:
    more = "The most recently used key comes first. Exits with 1 if one is damaged."
    _add_json(_add(actions, "ls", "list keys", more=more, examples=["holdfast cache ls"]))


def _add_cache_show(actions: Verbs) -> None:
    examples = ["holdfast cache show 3f2a", "holdfast cache show 3f2a --part flags"]
    parser = _add(actions, "show", "show a key and its variants", examples=examples)
    parser.add_argument("key", metavar="KEY", help="the beginning of a key")
    parser.add_argument("--part", metavar="PART", help="print this part of the key: graph, inputs, flags, ...")
    _add_json(parser)


def _add_cache_stat(actions: Verbs) -> None:
    _add_json(_add(actions, "stat", "show totals of the cache", examples=["holdfast cache stat"]))


def _add_cache_prune(actions: Verbs) -> None:
    more = (
        "Deletes damaged graphs and graphs over a limit, and keeps the others. Processes\n"
        "that may write to the store record use once a day; a graph without such a record\n"
        "counts as last used when it was saved."
    )
    examples = ["holdfast cache prune --max-size 20G", "holdfast cache prune --other-systems --yes"]
    parser = _add(actions, "prune", "delete graphs that are over a limit", more=more, examples=examples)
    parser.add_argument("--max-size", metavar="SIZE", help="keep at most SIZE, the most recently used: 500M, 20G")
    parser.add_argument("--max-age", metavar="TIME", help="delete graphs that were not used for TIME: 12h, 30d, 8w")
    parser.add_argument(
        "--other-systems", action="store_true", help="delete graphs that torch on this machine cannot use; loads torch"
    )
    _add_yes(parser)
    _add_json(parser)


def _add_cache_clear(actions: Verbs) -> None:
    parser = _add(actions, "clear", "delete all compiled graphs", examples=["holdfast cache clear --yes"])
    _add_yes(parser)
    _add_json(parser)


def _add_cache_why(actions: Verbs) -> None:
    more = (
        "Shows part by part how two keys differ: the reason why the graph of one could\n"
        "not be used for the other. A defaults to the newest key, B to the key most like A."
    )
    examples = ["holdfast cache why", "holdfast cache why 3f2a", "holdfast cache why 3f2a 9c01"]
    parser = _add(actions, "why", "explain why a graph was compiled again", more=more, examples=examples)
    parser.add_argument("a", metavar="A", nargs="?", help="the beginning of a key")
    parser.add_argument("b", metavar="B", nargs="?", help="the beginning of another key")
