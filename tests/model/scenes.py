"""The scenes: small casts that together cover saves, overwrites, repacks, deletes, collectors and fences."""

from __future__ import annotations

from typing import Final

from tests.model.collecting import Collect
from tests.model.explore import OLD_FILES, Scene
from tests.model.world import Mark, Record
from tests.model.writer import Delete, Save, Writer

OLD: Final = Record(0, -1, True, manifest="m:old:0", packs=frozenset(["p:old:a"]), content="a")
TOMBSTONE: Final = Record(1, -1, is_live=False)
ORPHAN: Final = frozenset(["p:old:b"])
"""A pack that no snapshot needs, and that a save may find and reuse."""

FULL: Final = frozenset(["m:old:0", "p:old:ab"])
MOSTLY_DEAD: Final = OLD._replace(packs=frozenset(["p:old:ab"]))
REPACK: Final = Save("repack", avoid=frozenset(["p:old:ab"]))

# A snapshot that is stored as a delta, and the snapshot that contains its base.
DELTA_FILES: Final = frozenset(["m:old:0", "p:old:a", "m:old:1", "p:old:B"])
DELTA: Final = Record(0, -1, True, manifest="m:old:1", packs=frozenset(["p:old:a", "p:old:B"]), content="b")
MIXED_FILES: Final = frozenset(["m:old:1", "p:old:ax", "p:old:B"])
"""The base is in a pack that is mostly dead."""
MIXED: Final = DELTA._replace(packs=frozenset(["p:old:ax", "p:old:B"]))

# A save that was fenced, lost the orphan to a collector, committed all the same, and has not looked yet.
DOOMED: Final = Record(1, 0, True, 0, "m:0:0", ORPHAN, "b")
DOOMED_WRITER: Final = Writer("release", 1, None, (OLD,), content="b", packs=ORPHAN, manifest=0, lease_generation=1)
FENCED: Final = ((0, "live"), (1, "live"), (2, "fenced"))

SCENES: Final = {
    scene.title: scene
    for scene in (
        Scene("first save, collector", (Save("first"), Collect(purges=True))),
        Scene(
            "first save that forgets, collector", (Save("first", content="ab", forgets=True, keeps_alive=1), Collect())
        ),
        Scene(
            "first save at once, collector",
            (Save("first", content="ab", forgets=True, at_once=True), Collect(purges=True)),
            OLD_FILES | ORPHAN,
        ),
        Scene(
            "overwrite at once, save at once, collector",
            (Save("overwrite", content="b", at_once=True), Save("overwrite", content="ab", at_once=True), Collect()),
            OLD_FILES | ORPHAN,
            ((OLD,),),
        ),
        Scene("two first saves, collector", (Save("first"), Save("first", content="b"), Collect())),
        Scene("first save, the same again, collector", (Save("first"), Save("repeat"), Collect())),
        Scene(
            "overwrite, collector",
            (Save("overwrite", content="ab"), Collect(purges=True)),
            OLD_FILES | ORPHAN,
            ((OLD,),),
        ),
        Scene(
            "overwrite, two collectors",
            (Save("overwrite", content="b", forgets=True), Collect(), Collect(adopts=True)),
            OLD_FILES | ORPHAN,
            ((OLD,),),
        ),
        Scene(
            "two overwrites, collector",
            (Save("overwrite", content="b"), Save("overwrite", content="ab"), Collect()),
            OLD_FILES | ORPHAN,
            ((OLD,),),
        ),
        Scene(
            "overwrite of a doomed save, collector",
            (Save("overwrite", content="b"), Save("overwrite", content="c"), Collect(purges=True)),
            OLD_FILES | {"m:0:0", "p:old:c"},
            ((OLD, DOOMED),),
            under_way=((0, DOOMED_WRITER, FENCED),),
        ),
        Scene(
            "overwrite of a save whose pack is marked, collector",
            (Save("overwrite", content="b"), Save("overwrite", content="c"), Collect(adopts=True)),
            OLD_FILES | ORPHAN | {"m:0:0", "p:old:c"},
            ((OLD, DOOMED),),
            frozenset([Mark(9, ORPHAN)]),
            under_way=((0, DOOMED_WRITER, FENCED[:2]),),
        ),
        Scene(
            "save of many renewals, collector",
            (Save("first", content="ab", keeps_alive=2), Collect(expires=True)),
        ),
        Scene(
            "repack, overwrite, collector",
            (REPACK, Save("overwrite", content="ab"), Collect()),
            FULL,
            ((MOSTLY_DEAD,),),
        ),
        Scene(
            "overwrite, repack, collector, purger",
            (Save("overwrite", content="b"), REPACK, Collect(fences=False), Collect(sweeps=False, purges=True)),
            FULL,
            ((MOSTLY_DEAD,),),
        ),
        Scene("delete, first save, collector", (Delete(), Save("first"), Collect(purges=True)), names=((OLD,),)),
        Scene(
            "delete, two collectors that adopt, save under another name",
            (Delete(0), Collect(fences=False, adopts=True), Collect(fences=False, adopts=True), Save("first", 1, "a")),
            OLD_FILES,
            ((OLD,), ()),
            frozenset([Mark(9, OLD_FILES, frozenset())]),
        ),
        Scene(
            "delete, two collectors that adopt and withdraw, save under another name",
            (
                Delete(0),
                Collect(fences=False, adopts=True, withdraws=True),
                Collect(fences=False, adopts=True, withdraws=True),
                Save("first", 1, "a"),
            ),
            OLD_FILES,
            ((OLD,), ()),
            frozenset([Mark(9, OLD_FILES, frozenset())]),
            has_lock=True,
        ),
        Scene(
            "first save, collector that uses the lock",
            (Save("first", forgets=True), Collect(fences=False, purges=True, clears=True, hurries=True)),
            has_lock=True,
        ),
        Scene(
            "overwrite, collector that uses the lock",
            (
                Save("overwrite", content="ab", forgets=True, keeps_alive=1),
                Collect(clears=True, hurries=True, withdraws=True, purges=True),
            ),
            OLD_FILES | ORPHAN,
            ((OLD,),),
            has_lock=True,
        ),
        Scene(
            "two first saves after a delete, purger",
            (Save("first"), Save("first", content="b"), Collect(sweeps=False, purges=True)),
            OLD_FILES,
            ((OLD, TOMBSTONE),),
        ),
        Scene(
            "delete, save under another name, collector",
            (Delete(0), Save("first", 1, "a"), Collect(purges=True)),
            names=((OLD,), ()),
        ),
        Scene(
            "delete of a base, save of a delta, collector",
            (Delete(0), Save("first", 1, "b", deltas=True), Collect(purges=True)),
            OLD_FILES,
            ((OLD,), ()),
        ),
        Scene(
            "deletes of a delta and its base, save that finds the delta, collector",
            (Delete(0), Delete(1), Save("first", 2, "b", deltas=True), Collect()),
            DELTA_FILES,
            ((OLD,), (DELTA,), ()),
        ),
        Scene(
            "delete of a delta, save of a delta on it, collector",
            (Delete(0), Save("first", 1, "c", deltas=True), Collect(purges=True)),
            DELTA_FILES - OLD_FILES | {"p:old:a"},
            ((DELTA,), ()),
        ),
        Scene(
            "repack of a base, save of a delta, collector",
            (Save("repack", 0, avoid=frozenset(["p:old:ax"])), Save("first", 1, "b", deltas=True), Collect()),
            MIXED_FILES,
            ((MIXED,), ()),
        ),
        Scene(
            "delete, save that skips under another name, collector",
            (Delete(0), Save("first", 1, "ab", skips=True), Collect(purges=True)),
            OLD_FILES | ORPHAN,
            ((OLD,), ()),
        ),
        Scene(
            "overwrite that skips, two collectors",
            (Save("overwrite", content="b", forgets=True, skips=True), Collect(), Collect(adopts=True)),
            OLD_FILES | ORPHAN,
            ((OLD,),),
        ),
        Scene(
            "overwrite of a base by its delta, two collectors",
            (Save("overwrite", content="b", deltas=True, forgets=True), Collect(), Collect(adopts=True)),
            OLD_FILES,
            ((OLD,),),
        ),
    )
}

SLOW_SCENES: Final = {
    scene.title: scene
    for scene in (
        Scene(
            "overwrite at once, two collectors",
            (Save("overwrite", content="b", forgets=True, at_once=True), Collect(), Collect(adopts=True)),
            OLD_FILES | ORPHAN,
            ((OLD,),),
        ),
        Scene(
            "overwrite beside a mark on what it replaces, two collectors",
            (Save("overwrite", content="b", forgets=True), Collect(adopts=True), Collect()),
            OLD_FILES | ORPHAN,
            ((OLD,),),
            frozenset([Mark(9, frozenset(["p:old:a"]), frozenset())]),
        ),
        Scene(
            "overwrite, two collectors on their own",
            (Save("overwrite", content="b"), Collect(), Collect()),
            OLD_FILES | ORPHAN,
            ((OLD,),),
        ),
        Scene(
            "overwrite, two collectors that withdraw",
            (
                Save("overwrite", content="b", forgets=True),
                Collect(withdraws=True),
                Collect(adopts=True, withdraws=True),
            ),
            OLD_FILES | ORPHAN,
            ((OLD,),),
            has_lock=True,
        ),
        Scene(
            "overwrite, two collectors that use the lock",
            (
                Save("overwrite", content="b", forgets=True),
                Collect(clears=True, hurries=True, withdraws=True),
                Collect(adopts=True, hurries=True),
            ),
            OLD_FILES | ORPHAN,
            ((OLD,),),
            has_lock=True,
        ),
        Scene(
            "overwrite of a save whose pack is marked, two collectors",
            (Save("overwrite", content="b"), Save("overwrite", content="c"), Collect(adopts=True), Collect()),
            OLD_FILES | ORPHAN | {"m:0:0", "p:old:c"},
            ((OLD, DOOMED),),
            frozenset([Mark(9, ORPHAN)]),
            under_way=((0, DOOMED_WRITER, FENCED[:2]),),
        ),
        Scene(
            "overwrite, repack, two collectors that fence",
            (Save("overwrite", content="b"), REPACK, Collect(), Collect(adopts=True)),
            FULL,
            ((MOSTLY_DEAD,),),
        ),
        Scene(
            "overwrite, repack, collector that purges, collector that adopts",
            (Save("overwrite", content="b"), REPACK, Collect(fences=False, purges=True), Collect(adopts=True)),
            FULL,
            ((MOSTLY_DEAD,),),
        ),
    )
}
