"""Loading from forged stores: the result is the exact tree or one of our errors, with bounded time and memory."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch

from holdfast.digest import hash_bytes
from holdfast.errors import HoldfastError
from holdfast.json_text import Json
from holdfast.objects.memory import MemoryStore
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.layout import CONFIG, INDEX, MANIFESTS, PACKS, SNAPSHOTS, ManifestRef, manifest_key
from holdfast.repo.format.manifest import encode_manifest, read_manifest
from holdfast.repo.handle.repository import open_repository
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.snapshot.batches import LoadOptions
from holdfast.snapshot.lazy import Snapshot
from holdfast.store import OpenOptions, Store
from holdfast.trees.registered import Types
from tests.faults.damage import replace as replace_object
from tests.kit.memory import measure_rise_kib
from tests.kit.tensors import SUBCLASSES, TENSORS, find_facts

MAX_EXTRA_KIB: Final = 300 << 10
FORGED: Final = f"{'f' * 24}-{'f' * 16}"


def make_trees() -> dict[str, Any]:
    """Return small trees that together have everything a manifest can state about a leaf."""
    base = torch.arange(24, dtype=torch.float32)
    sparse = TENSORS["sparse_coo/hybrid"]()
    jagged = TENSORS["jagged/with known lengths"]()
    named = OrderedDict(weight=torch.nn.Parameter(base.view(4, 6)))
    named._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as state dicts of modules have it
    return {
        "views": {"whole": base, "rows": base[6:18], "ints": base.view(torch.int32)[3:9], "t": base.view(4, 6).t()},
        "gaps": [base[::2], base[1:8].view(torch.int32), torch.ones(3, 8)[:, ::3], torch.ones(5).expand(3, 5)],
        "tied gaps": {"a": (gappy := torch.arange(30)[::7]), "b": gappy, "c": gappy.detach()},
        "flags": (torch.ones(3, dtype=torch.complex64).conj(), TENSORS["complex64/imag of conj"](), base[0]),
        "roles": [TENSORS["role/buffer"](), TENSORS["role/passing buffer"](), TENSORS["role/parameter"]()],
        "quantised": [TENSORS["quint8/per channel 1"](), TENSORS["qint8/whole"](), TENSORS["quint4x2/whole"]()],
        "meta": [torch.empty(4, 5, device="meta"), TENSORS["sparse_coo/meta"]()],
        "coo": [sparse, sparse, TENSORS["sparse_coo/none"]()],
        "compressed": [TENSORS[f"sparse_{kind}/whole"]() for kind in ("csr", "csc", "bsr", "bsc")],
        "nested": [TENSORS["nested/transposed"](), TENSORS["nested/some rows"](), jagged, jagged],
        "subclass": [TENSORS["subclass/of a subclass"](), TENSORS["subclass/of a sparse one"]()],
        "grad": [TENSORS["grad/parameter"](), TENSORS["grad/sparse"]()],
        "arrays": [np.arange(6, dtype=">i4").reshape(2, 3).T, np.array("2001-01-01", "M8[s]"), np.array(["ab"])],
        "plain": {"a": [1, 2.5, None, True], ("k", 1): {3, 4}, "s": "x" * 5000, "b": b"y" * 5000, "o": named},
    }


class Forger:
    """A store with one tree, and snapshots of it with false manifests whose digests are right."""

    def __init__(self, tree: Any) -> None:
        self.store = MemoryStore()
        self.types = Types(SUBCLASSES)
        Store(self.store, OpenOptions(types=SUBCLASSES, environment=False)).save("x", tree, grads=True)
        self.repo = open_repository(self.store)
        self.record = read_snapshot(self.store, "x")
        manifest = read_manifest(self.store, self.record.manifest)
        self.spec: Json = manifest.spec
        self.entries = list(manifest.iter_entries())

    def forge(self, spec: Json, entries: list[Entry]) -> Snapshot:
        data = encode_manifest(spec, entries)
        if manifest_key(FORGED) in self.store.contents():
            self.store.delete(manifest_key(FORGED))
        self.store.create(manifest_key(FORGED), data)
        ref = ManifestRef(FORGED, hash_bytes(data), len(data))
        return Snapshot(self.repo, replace(self.record, manifest=ref), self.types)


INTERESTING: Final[tuple[Json, ...]] = (
    *(0, 1, 2, 3, 7, 8, 63, 64, 65, 255, 4096, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 40) + 1, 1 << 59),
    *(1 << 60, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 200, -1, -2, -(1 << 31), -(1 << 63), 0.5, -0.0),
    *(1e300, True, False, None, "", "x", "tensor", "float64", "bits16", "quint4x2", "complex128", "per_tensor", "@"),
    *([], {}, [[]], [1], [0, 0], [2, 3], [1 << 30, 1 << 30], ["dict"], ["list", 1], ["@tensor", 0], ["@pickle", 0]),
    *(["@bytes", 0], ["@parts", "nested", {}, None], ["@grad", 1, 1], ["@tensor", 0, []], ["set", ["@tensor", 0]]),
)


def mutate(value: Json, chance: random.Random) -> Json:
    """Return a JSON value with one thing in it changed."""
    if isinstance(value, list | dict) and value and chance.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = chance.choice(keys)
        changed: Any = value.copy()
        act = chance.randrange(10)
        if act == 0:
            del changed[key]
        elif act == 1:
            changed[key] = value[chance.choice(keys)]
        elif act == 2 and isinstance(changed, list):
            changed.insert(key, value[chance.choice(keys)])
        elif act == 3 and isinstance(changed, list):
            chance.shuffle(changed)
        else:
            changed[key] = mutate(value[key], chance)
        return changed
    if isinstance(value, int) and chance.random() < 0.5:
        return value + chance.choice((-1, 1, value, 8, -8))
    if isinstance(value, str) and value and chance.random() < 0.5:
        at = chance.randrange(len(value))
        return value[:at] + chance.choice("0af-@[\x00\u00e9") + value[at + chance.randrange(2) :]
    return chance.choice(INTERESTING)


def mutate_entries(entries: list[Entry], chance: random.Random) -> list[Entry]:
    """Return the entries with one of them changed, or two of them exchanged."""
    changed = list(entries)
    at, other = chance.randrange(len(entries)), chance.randrange(len(entries))
    entry = entries[at]
    act = chance.randrange(8)
    if act == 0:
        changed[at] = entries[other]._replace(name=entry.name)
    elif act == 1:
        changed[at] = entry._replace(alias=chance.choice((0, 1, 2, entries[other].alias, 0xFFFFFFFF)))
    elif act == 2:
        changed[at] = entry._replace(spec=entries[other].spec)
    elif act == 3:
        changed[at] = entry._replace(note=chance.choice(({"device": "meta"}, {"device": "no"}, {"device": 3}, [])))
    elif act == 4:
        chunks = entries[other].chunks
        changed[at] = entry._replace(chunks=chunks, size_bytes=sum(chunk.size_bytes for chunk in chunks))
    else:
        changed[at] = entry._replace(spec=mutate(entry.spec, chance))
    return changed


def describe(value: Any) -> object:
    """Return a full description of a tree, with every byte, so that it can be compared."""
    if isinstance(value, torch.Tensor):
        return find_facts(value) if not value.is_meta else (value.shape, value.dtype)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        attributes = repr(vars(value)) if isinstance(value, OrderedDict) else ""
        return type(value), [(key, describe(item)) for key, item in value.items()], attributes
    if isinstance(value, list | tuple):
        return type(value), [describe(item) for item in value]
    return type(value), repr(value)


def load_or_refuse(load: Callable[[], object]) -> object:
    """Load, and look at every byte; whatever is raised must be an error of ours."""
    try:
        value = load()
    except HoldfastError:
        return None
    return describe(value)


def forge_once(forger: Forger, seed: str) -> bool:
    """Load one forged snapshot in one of the possible ways; return whether it was accepted."""
    chance = random.Random(seed)
    spec, entries = forger.spec, forger.entries
    for _ in range(chance.choice((1, 1, 2, 3))):
        if chance.random() < 0.5:
            spec = {"tree": mutate(spec["tree"], chance)}
        else:
            entries = mutate_entries(entries, chance)
    options = LoadOptions(
        device=chance.choice(("cpu", "cpu", "saved", "meta")),
        aliases=chance.choice(("preserve", "preserve", "fresh")),
        dtype=chance.choice((None, None, torch.bfloat16, torch.float64)),
    )
    try:
        snapshot = forger.forge(spec, entries)
    except (ValueError, TypeError, OverflowError):
        return False  # not even JSON, or not a manifest
    return load_or_refuse(lambda: snapshot.load(options)) is not None


def fuzz_manifests(name: str, rounds: range) -> None:
    forger = Forger(make_trees()[name])
    accepted: list[bool] = []
    extra_kib = measure_rise_kib(lambda: accepted.extend(forge_once(forger, f"{name} {seed}") for seed in rounds))
    assert extra_kib < MAX_EXTRA_KIB
    # Neither so wild that nothing gets as far as a tensor, nor so tame that nothing is refused.
    assert 0 < sum(accepted) < len(accepted)


TREES: Final = tuple(make_trees())


@pytest.mark.parametrize(
    "name",
    [name if number % 3 == 0 else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(TREES)],
)
def test_a_manifest_that_lies_is_refused_or_means_something(name: str) -> None:
    fuzz_manifests(name, range(60))


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_many_manifests_that_lie_are_refused_or_mean_something(name: str) -> None:
    fuzz_manifests(name, range(60, 1000))


def test_an_honest_forgery_is_loaded() -> None:
    for tree in make_trees().values():
        forger = Forger(tree)
        assert describe(forger.forge(forger.spec, forger.entries).load()) == describe(tree)


def damage(store: MemoryStore, chance: random.Random) -> None:
    """Do something to the files of a store that digests should notice."""
    contents = store.contents()
    key = chance.choice([key for key in contents if key.startswith((PACKS, MANIFESTS, SNAPSHOTS, INDEX, CONFIG))])
    data = bytearray(contents[key])
    at, other = (chance.randrange(len(data)) for _ in range(2))
    act = chance.randrange(7)
    if act == 0:
        store.delete(key)
        return
    if act == 1:
        twin = chance.choice(list(contents))
        replace_object(store, key, contents[twin])
        return
    if act == 2:
        del data[at:]
    elif act == 3:
        data[at:at] = data[other : other + chance.randrange(1, 100)]
    elif act == 4:
        del data[at : at + chance.randrange(1, 100)]
    elif act == 5:
        data[at : at + 16] = chance.randbytes(16)
    else:
        data[at] ^= 1 << chance.randrange(8)
    replace_object(store, key, bytes(data))


def make_whole() -> tuple[MemoryStore, object]:
    """Return a store with a tree, some of it in packs, and the description of the tree."""
    trees = make_trees()
    tree = {name: trees[name] for name in ("views", "gaps", "plain", "arrays", "quantised")}
    tree["large"] = torch.arange(40_000, dtype=torch.int32).view(200, 200)[:, ::2]
    store = MemoryStore()
    face = Store(store, OpenOptions(types=SUBCLASSES, environment=False))
    face.save("x", tree)
    face.save("y", {"large": tree["large"] + 1, "w": torch.ones(3000)})
    return store, describe(tree)


def fuzz_files(rounds: range) -> None:
    whole, wanted = make_whole()
    outcomes = set()
    for seed in rounds:
        chance = random.Random(f"files {seed}")
        store = whole.clone()
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            damage(store, chance)
        found = load_or_refuse(lambda store=store: Store(store, OpenOptions(types=SUBCLASSES)).load("x"))  # type: ignore[misc]  # mypy cannot tell
        assert found is None or found == wanted, f"wrong bytes after {seed}"
        outcomes.add(found is None)
    assert outcomes == {True, False}


def test_damaged_files_are_refused_or_do_not_matter() -> None:
    fuzz_files(range(60))


@pytest.mark.slow
def test_files_damaged_in_many_ways_are_refused_or_do_not_matter() -> None:
    fuzz_files(range(60, 2000))


def test_a_few_bytes_cannot_ask_for_much_memory() -> None:
    forger = Forger({"a": torch.arange(12.0)[::4], "b": torch.ones(2)})
    spec = {**forger.entries[0].spec, "stride": [1 << 36]}
    forged = forger.forge(forger.spec, [forger.entries[0]._replace(spec=spec), forger.entries[1]])
    assert measure_rise_kib(lambda: load_or_refuse(forged.load)) < 50 << 10
