"""The verb `cache`: what it lists, shows, adds up, explains and deletes; and artifacts that travel by `copy`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from holdfast.cli.verbs.cache import parse_size
from holdfast.compile_cache.artifacts.artifact import Artifact, read_artifact
from holdfast.compile_cache.artifacts.catalog import artifact_name, iter_variants
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.compile_cache.key.system import describe_system
from holdfast.errors import BadName
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import Repository, open_repository
from tests.cli.runs import Cli, digest_tree
from tests.cli.test_grammar import HEAVY, PROGRAM
from tests.kit.compile_artifacts import OTHER_SECRET, SECRET, make_artifact, make_key, store_artifact
from tests.kit.saving import noise, record_key
from tests.kit.thinning import thin

A, B = (make_key(seed).digest for seed in "ab")


def _open(cli: Cli, place: str = "ckpts") -> Repository:
    return open_repository(LocalStore(cli.folder / place), create=True)


@pytest.fixture
def filled(cli: Cli) -> Cli:
    """A store with two keys, one of them with two variants, and a snapshot of the user's."""
    repo = _open(cli)
    store_artifact(repo, make_artifact("a", guards="s0 > 8", graph=noise(50_000)))
    store_artifact(repo, make_artifact("a", guards="s0 <= 8"))
    store_artifact(repo, make_artifact("b"), secret=SECRET)
    cli.ok("put", "mine", "data/config.json")
    return cli


def test_ls_lists_keys(filled: Cli) -> None:
    lines = filled.ok("cache", "ls").splitlines()

    assert lines[0].split() == ["KEY", "VARIANTS", "SIZE", "USED", "COMPILED", "TORCH"]
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    assert rows.keys() == {A[:12], B[:12]}
    assert rows[A[:12]][1] == "2"
    assert rows[A[:12]][-3:] == ["12.5", "s", "2.13.0"]


def test_ls_of_nothing_says_so(cli: Cli) -> None:
    ran = cli("cache", "ls")

    assert (ran.code, ran.out, ran.err) == (0, "", f"holdfast: no compiled graph in {cli.store}\n")


def test_ls_prints_json(filled: Cli) -> None:
    keys = {key["key"]: key for key in filled("cache", "ls", "--json").json["keys"]}

    assert [variant["guards"] for variant in keys[A]["variants"]] == ["s0 > 8", "s0 <= 8"]
    assert [variant["signed"] for variant in keys[B]["variants"]] == [True]


def test_show_shows_variants_and_parts(filled: Cli) -> None:
    out = filled.ok("cache", "show", A[:5])

    assert re.search(rf"^key +{A}$", out, re.MULTILINE)
    assert re.search(rf"^part system +{make_key('a').digests['system']}$", out, re.MULTILINE)
    assert re.search(rf"^variant +{artifact_name(A, 1)}$", out, re.MULTILINE)
    assert re.search(r"^guards +s0 <= 8$", out, re.MULTILINE)
    assert filled("cache", "show", artifact_name(A, 0), "--json").json["key"] == A


def test_show_prints_a_part(filled: Cli) -> None:
    assert filled("cache", "show", A, "--part", "graph").json == ["call a"]
    ran = filled("cache", "show", A, "--part", "none")
    assert (ran.code, ran.err.splitlines()) == (
        2,
        [
            "holdfast: a key has no part 'none'; its parts are"
            " aliasing, config, constants, custom_ops, flags, graph, inputs, options, system"
        ],
    )


def test_a_key_that_is_not_there_or_means_several_is_an_error(filled: Cli) -> None:
    assert filled("cache", "show", "xyz").err == (
        f"holdfast: no key in {filled.store} begins with 'xyz'; `holdfast cache ls` lists them\n"
    )
    store_artifact(_open(filled), make_artifact("c"))
    seeds = (f"s{number}" for number in range(100))
    twin = next(seed for seed in seeds if make_key(seed).digest[0] == A[0])
    store_artifact(_open(filled), make_artifact(twin))
    assert re.match(
        rf"holdfast: \d keys begin with '{A[0]}', for example \w+; give more", filled("cache", "show", A[0]).err
    )


def test_stat_adds_up(filled: Cli) -> None:
    assert filled.ok("cache", "stat").splitlines()[0].startswith("2 keys with 3 variants of ")
    assert filled.ok("cache", "stat").splitlines()[1] == "1 signed, 0 damaged; for 1 system, torch 2.13.0"
    totals = filled("cache", "stat", "--json").json
    assert (totals["keys"], totals["variants"], totals["compile_seconds"]) == (2, 3, 37.5)


def test_damage_is_told(filled: Cli) -> None:
    record = filled.store / record_key(artifact_name(B, 0))
    record.write_bytes(record.read_bytes()[:-1] + b"?")

    for words in (["ls"], ["stat"], ["show", B]):
        ran = filled("cache", *words)
        assert ran.code == 1
        assert ran.err.startswith(f"holdfast: {artifact_name(B, 0)} cannot be used: record ")


def test_prune_says_what_would_go_and_acts_only_if_told(filled: Cli) -> None:
    before = digest_tree(filled.store)

    ran = filled("cache", "prune", "--max-size", "10K")

    assert re.search(rf"^delete +{A[:12]} .* over the size limit$", ran.out, re.MULTILINE)
    assert re.search(rf"^keep +{B[:12]} ", ran.out, re.MULTILINE)
    assert re.fullmatch(r"holdfast: nothing was deleted; repeat with --yes to delete 1 key of [0-9.]+ KiB\n", ran.err)
    assert digest_tree(filled.store) == before

    ran = filled("cache", "prune", "--max-size", "10K", "--yes")

    assert "holdfast: deleted 2 variants of 1 key of " in ran.err
    assert [key["key"] for key in filled("cache", "ls", "--json").json["keys"]] == [B]
    assert filled("ls", "--json").json["snapshots"][0]["name"] == "mine"


def test_prune_by_age_keeps_what_is_young(filled: Cli) -> None:
    assert filled("cache", "prune", "--max-age", "1d", "--json").json["delete"] == []


def test_prune_knows_this_system(filled: Cli) -> None:
    mine = make_key("mine", system=describe_system(["cpu"]))
    store_artifact(_open(filled), make_artifact(key=mine))

    plan = filled("cache", "prune", "--other-systems", "--json").json

    assert plan["keep"] == [mine.digest]
    assert {(each["key"], each["reason"]) for each in plan["delete"]} == {
        (A, "compiled for another system"),
        (B, "compiled for another system"),
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give at least one limit: --max-size, --max-age or --other-systems"),
        (["--max-size", "many"], "'many' is not a size; write a number and one of K, M, G, T, such as 20G"),
        (["--max-age", "3y"], "'3y' is not a duration; write numbers with w, d, h, m or s, such as 7d or 3h50m"),
    ],
)
def test_limits_that_mean_nothing_are_refused(filled: Cli, words: list[str], said: str) -> None:
    ran = filled("cache", "prune", *words)

    assert (ran.code, ran.err) == (2, f"holdfast: {said}\n")


def test_clear_deletes_all_artifacts_and_nothing_else(filled: Cli) -> None:
    assert filled("cache", "clear").err.startswith(
        "holdfast: nothing was deleted; repeat with --yes to delete 2 keys of"
    )

    filled("cache", "clear", "--yes")

    assert filled("cache", "ls", "--json").json["keys"] == []
    assert [each["name"] for each in filled("ls", "--json").json["snapshots"]] == ["mine"]
    assert filled("check").code == 0


def test_why_compares_the_newest_with_the_nearest(cli: Cli) -> None:
    repo = _open(cli)
    for seed, flags in (("x", {"grad": False}), ("far", {"grad": False}), ("x", {"grad": True})):
        store_artifact(repo, make_artifact(key=make_key(seed, flags=flags)))

    lines = cli.ok("cache", "why").splitlines()

    assert lines[0] == "missed: flags changed (grad False -> True)"
    assert lines[1] == f"nearest stored: {artifact_name(make_key('x', flags={'grad': False}).digest, 0)}"


def test_why_compares_two_keys(filled: Cli) -> None:
    lines = filled.ok("cache", "why", A[:8], B[:8]).splitlines()

    assert lines[0] == "missed: graph changed (1 of 1 lines removed, 1 added)"
    assert lines[-2:] == ["-call b", "+call a"]


def test_why_needs_two(cli: Cli) -> None:
    assert cli("cache", "why").err == f"holdfast: {cli.store} has 0 keys; two are needed to compare\n"


@pytest.mark.parametrize("text", ["", "G", "1.5G", "-1", "10GG", "1 G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BadName):
        parse_size(text)


def test_sizes() -> None:
    sizes = {"0": 0, "17": 17, "2K": 2048, "3M": 3 << 20, "20G": 20 << 30, "1T": 1 << 40, "5MiB": 5 << 20}

    assert {text: parse_size(text) for text in sizes} == sizes


@pytest.mark.parametrize(
    "words",
    thin([["ls"], ["stat"], ["show", A], ["why"], ["prune", "--max-size", "1G"], ["clear"], ["clear", "--yes"]]),
    ids=" ".join,
)
def test_no_action_loads_what_is_heavy(filled: Cli, words: list[str]) -> None:
    command = [sys.executable, "-c", PROGRAM, "-s", str(filled.store), "cache", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert set(done.stderr.splitlines()[-1].split()) & HEAVY == set()


def test_copying_by_prefix_takes_all_artifacts_to_another_store(filled: Cli) -> None:
    out = filled.ok("copy", "@compiled/", "--to", str(filled.folder / "bundle"))

    assert len(re.findall("^copied @compiled/", out, re.MULTILINE)) == 3
    bundle = filled.folder / "bundle"
    bundle.chmod(0o777)
    found = next(iter_variants(_open(filled, "bundle").store, B))
    assert isinstance(read_artifact(_open(filled, "bundle"), found, trust=Trust(secret=SECRET)), Artifact)
    again = filled.ok("copy", "@compiled/", "--to", str(bundle)).splitlines()
    assert re.search(r" has the equivalent .*, nothing was copied$", again[0])
    assert len(again) == 3


def test_an_artifact_whose_number_is_taken_gets_another(filled: Cli) -> None:
    there = _open(filled, "other")
    store_artifact(there, make_artifact("a", guards="s0 == 1"))
    store_artifact(there, make_artifact("b"), secret=OTHER_SECRET)

    out = filled.ok("copy", "@compiled/", "--to", str(filled.folder / "other"))

    assert f"copied {artifact_name(A, 0)} as {artifact_name(A, 1)}: " in out
    assert [found.guards for found in iter_variants(there.store, A)] == ["s0 == 1", "s0 > 8", "s0 <= 8"]
    assert [found.number for found in iter_variants(there.store, B)] == [0, 1]
    assert filled.bare("-s", str(filled.folder / "other"), "check").code == 0


def test_copying_by_prefix_takes_the_users_snapshots_and_names_what_is_damaged(cli: Cli) -> None:
    for name in ("run/1", "run/2", "run/10", "other"):
        cli.ok("put", name, "data/config.json")

    out = cli.ok("copy", "run/", "--to", str(cli.folder / "b"))

    assert [line.split()[1] for line in out.splitlines()] == ["run/1:", "run/2:", "run/10:"]
    record = cli.store / record_key("run/2")
    record.write_bytes(record.read_bytes()[:-1] + b"?")
    ran = cli("copy", "run/", "--to", str(cli.folder / "c"))
    assert ran.code == 1
    assert "run%2f2 is damaged and was not copied: record" in ran.err
    assert len(ran.out.splitlines()) == 2


def test_a_prefix_without_snapshots_is_an_error(cli: Cli) -> None:
    ran = cli("copy", "none/", "--to", str(cli.folder / "b"))

    assert (ran.code, ran.err) == (
        2,
        f"holdfast: no snapshot starts with 'none/' in {cli.store}; `holdfast ls` lists them\n",
    )
