"""The verbs `du`, `prune` and `gc`: plans first, deletion with --yes, and clear answers to bad input."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.verbs import space
from holdfast.objects.local.local_store import LocalStore
from holdfast.objects.protocol import ObjectStore
from holdfast.progress import Progress
from holdfast.repo.format.layout import MAX_GENERATION
from holdfast.repo.names.snapshots import read_snapshot, set_tag
from holdfast.repo.upkeep.prune import Pruned, PrunePlan, apply_prune_in_groups
from tests.cli.runs import Cli, digest_tree
from tests.kit.standing import LEASE_ID, put_lease

# --- du


def test_du_shows_each_snapshot_in_natural_order_and_the_sum(steps: Cli) -> None:
    lines = steps.ok("du").splitlines()
    assert lines[0].split() == ["NAME", "LOGICAL", "STORED", "SHARED", "OWN"]
    assert [line.split()[0] for line in lines[1:6]] == [
        "run/step-90", "run/step-100", "run/step-110", "run/step-200", "twin",
    ]  # fmt: skip
    assert re.fullmatch(r"5 snapshots of 9\.8 KiB, stored in [0-9.]+ KiB; `holdfast gc` can free 0 B", lines[6])


def test_du_as_json_adds_up(steps: Cli) -> None:
    found = steps("du", "--json").json
    by_name = {each["name"]: each for each in found["snapshots"]}
    assert by_name["twin"]["shared_bytes"] == by_name["run/step-200"]["shared_bytes"] == 2000
    assert by_name["run/step-90"]["own_bytes"] == by_name["run/step-90"]["stored_bytes"]
    assert found["live_bytes"] + found["reclaimable_bytes"] == found["stored_bytes"]
    assert found["logical_bytes"] == 10_000


def test_du_of_a_prefix_counts_what_is_shared_with_other_prefixes_as_shared(steps: Cli) -> None:
    found = steps("du", "twin", "--json").json
    assert [each["name"] for each in found["snapshots"]] == ["twin"]
    assert found["snapshots"][0]["shared_bytes"] == 2000
    assert found["logical_bytes"] == 10_000


def test_du_of_an_empty_store(cli: Cli) -> None:
    assert cli.ok("du") == "0 snapshots of 0 B, stored in 0 B; `holdfast gc` can free 0 B\n"


# --- prune


def test_prune_prints_its_plan_and_changes_nothing(steps: Cli) -> None:
    before = digest_tree(steps.store)
    ran = steps("prune", "--keep-last", "1", "run/")
    assert ran.code == 0
    rows = [line.split() for line in ran.out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [
        ["delete", "run/step-90"], ["delete", "run/step-100"], ["delete", "run/step-110"], ["keep", "run/step-200"],
    ]  # fmt: skip
    assert ran.out.splitlines()[-1].endswith("among the last 1")
    assert ran.err == "holdfast: nothing was deleted; repeat with --yes to delete 3 snapshots\n"
    assert digest_tree(steps.store) == before


def test_prune_with_yes_deletes(steps: Cli) -> None:
    ran = steps("prune", "--keep-every", "100", "run/", "--yes")
    assert (ran.code, ran.err) == (0, "holdfast: deleted 2 snapshots; `holdfast gc --yes` frees the space\n")
    assert [each["name"] for each in steps("ls", "--json").json["snapshots"]] == [
        "run/step-100",
        "run/step-200",
        "twin",
    ]


@pytest.fixture
def late(steps: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The same, where somebody tags step 90 between the plan of a prune and its deed."""

    def tag_and_apply(store: ObjectStore, plan: PrunePlan, progress: Progress) -> Pruned:
        set_tag(store, "best", read_snapshot(store, "run/step-90"))
        return apply_prune_in_groups(store, plan, progress)

    monkeypatch.setattr(space, "apply_prune_in_groups", tag_and_apply)
    return steps


def test_prune_with_yes_keeps_what_is_tagged_meanwhile_and_says_so(late: Cli) -> None:
    ran = late("prune", "--keep-last", "1", "run/", "--yes")
    assert ran.code == 0
    assert "holdfast: kept run/step-90 after all: tagged best\n" in ran.err
    assert "holdfast: deleted 2 snapshots;" in ran.err
    assert [each["name"] for each in late("ls", "run/", "--json").json["snapshots"]] == ["run/step-90", "run/step-200"]


def test_prune_with_yes_as_json_tells_what_was_done(late: Cli) -> None:
    found = late("prune", "--keep-last", "1", "run/", "--yes", "--json").json
    assert found["keep"] == ["run/step-90", "run/step-200"]
    assert found["delete"] == ["run/step-100", "run/step-110"]


def test_prune_as_json(steps: Cli) -> None:
    steps.ok("tag", "best", "run/step-90")
    found = steps("prune", "--keep-last", "1", "run/", "--json").json
    assert found["keep"] == ["run/step-90", "run/step-200"]
    assert found["delete"] == ["run/step-100", "run/step-110"]


def test_prune_keeps_what_is_recent(steps: Cli) -> None:
    assert steps("prune", "--keep-within", "1h", "--json").json["delete"] == []


def test_prune_where_there_is_nothing(cli: Cli) -> None:
    ran = cli("prune", "--keep-last", "1")
    assert (ran.code, ran.out, ran.err) == (0, "", "holdfast: no snapshots to prune\n")


@pytest.mark.parametrize(("words", "text"), [
    ([], "give at least one rule"),
    (["--keep-last", "0"], "give at least one rule"),
    (["--keep-last", "-1"], "cannot be negative"),
    (["--keep-last", "two"], "invalid int value"),
    (["--keep-within", "7"], "'7' is not a duration; write numbers with w, d, h, m or s, such as 7d or 3h50m"),
    (["--keep-within", "7 d"], "is not a duration"),
    (["--keep-within", "-7d"], "expected one argument"),
    (["--keep-within", "9" * 400 + "d"], "is not a duration"),
    (["--keep-best", "val_loss"], "is not METRIC:N"),
    (["--keep-best", "val_loss:two"], "is not METRIC:N"),
    (["--keep-best", "val_loss:2:low"], "is not METRIC:N"),
    (["--keep-best", ":2"], "needs the name of a metric"),
    (["--keep-best", "val_loss:0"], "keeps at least one snapshot"),
    (["--keep-best", "val_loss:1"], "no snapshot here has the metric 'val_loss'; metrics that exist: none"),
])  # fmt: skip
def test_prune_refuses_bad_rules(steps: Cli, words: list[str], text: str) -> None:
    before = digest_tree(steps.store)
    ran = run(steps, "prune", *words, "--yes")
    assert ran[0] == 2
    assert text in ran[1]
    assert "Traceback" not in ran[1]
    assert digest_tree(steps.store) == before


def run(cli: Cli, *words: str) -> tuple[int, str]:
    """Run a command that may be refused by the grammar."""
    try:
        ran = cli(*words)
    except SystemExit as end:
        return int(end.code or 0), cli._capture.readouterr()[1].decode()
    return ran.code, ran.err


def test_the_best_by_a_metric_are_kept(cli: Cli) -> None:
    for step, loss in enumerate([3.0, 1.0, 2.0]):
        with holdfast.open(cli.store) as store:
            store.save(f"run/step-{step}", {"x": step}, metadata={"metrics": {"val_loss": loss}})

    planned = cli("prune", "--keep-best", "val_loss:1", "run/", "--json").json
    assert cli("prune", "--keep-best", "val_loss:1:max", "run/", "--yes").code == 0

    assert planned["keep"] == ["run/step-1"]
    assert [each["name"] for each in cli("ls", "--json").json["snapshots"]] == ["run/step-0"]


# --- gc


def test_gc_prints_its_plan_and_changes_nothing(steps: Cli) -> None:
    steps.ok("rm", "run/step-90", "--yes")
    before = digest_tree(steps.store)
    ran = steps("gc")
    assert ran.code == 0
    assert re.search(r"^would delete manifests/\S+ \(\d+ B\)$", ran.out, re.MULTILINE)
    assert re.search(r"^would delete packs/\S+ \([0-9.]+ (B|KiB)\)$", ran.out, re.MULTILINE)
    assert re.search(r"^not needed: 2 files, .*; in use: .*$", ran.out, re.MULTILINE)
    assert ran.err.startswith("holdfast: nothing was deleted; repeat with --yes")
    assert digest_tree(steps.store) == before


def test_gc_with_yes_frees_at_once_where_nobody_saves(steps: Cli) -> None:
    steps.ok("rm", "run/step-90", "--yes")
    planned = steps("gc", "--json").json
    done = steps("gc", "--yes", "--json").json
    assert done["deleted"] == len(planned["dead"]) == 2
    assert done["freed_bytes"] == planned["dead_bytes"]
    assert done["pending_marks"] == 0
    assert steps.ok("check", "--read")
    assert steps("gc", "--json").json["dead"] == []


def test_gc_with_nothing_to_do_says_so(steps: Cli) -> None:
    ran = steps("gc", "--yes")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "deleted 0 files, 0 B; 0 old records, 0 ended leases, 0 temporary files\n"


def test_gc_names_a_lease_that_it_cannot_fence(steps: Cli) -> None:
    store = LocalStore(str(steps.store))
    put_lease(store, MAX_GENERATION, host="elsewhere")
    path = steps.store / f"leases/{LEASE_ID}@{MAX_GENERATION}"
    os.utime(path, (path.stat().st_mtime - 86400,) * 2)
    ran = steps("gc", "--yes")
    assert ran.code == 0
    assert (
        f"holdfast: leases/{path.name} is a stale lease that cannot be fenced, because its generation numbers are"
        " exhausted: files that it might use are kept. If its save is dead, delete that file and run gc again\n"
    ) in ran.err


def test_gc_can_repack(cli: Cli) -> None:
    (cli.folder / "data/small").write_bytes(b"s" * 3000)
    cli.ok("put", "both", "data/")
    cli.ok("put", "one", "data/small")
    cli.ok("rm", "both", "--yes")
    ran = cli("gc", "--repack")
    assert "holdfast: would repack 1 pack used by 1 snapshot: copying 2.9 KiB to free 2.4 MiB\n" in ran.err
    assert cli("gc", "--repack", "--yes").code == 0
    assert sum(path.stat().st_size for path in (cli.store / "packs").iterdir()) < 10_000
    assert cli.ok("cat", "one", "small") == "s" * 3000
    assert "no pack is worth repacking" in cli("gc", "--repack", "--yes").err


@pytest.mark.parametrize("words", [["--min-age", "soon"], ["--wait", "1"], ["--yes", "--repack", "--min-age", "1y"]])
def test_gc_refuses_bad_times_before_it_does_anything(steps: Cli, words: list[str]) -> None:
    before = digest_tree(steps.store)
    ran = steps("gc", *words)
    assert (ran.code, ran.out) == (2, "")
    assert "is not a duration" in ran.err
    assert digest_tree(steps.store) == before


def test_gc_refuses_a_store_with_something_unknown(steps: Cli) -> None:
    (steps.store / "extra").mkdir()
    (steps.store / "extra/thing").write_bytes(b"")
    for words in (["gc"], ["gc", "--yes"]):
        ran = steps(*words)
        assert (ran.code, ran.out) == (2, "")
        assert "contains 'extra/thing', which this Holdfast does not know; nothing is collected" in ran.err


def test_gc_refuses_while_a_name_is_damaged(steps: Cli) -> None:
    path = next(path for path in (steps.store / "snapshots").rglob("*") if path.is_file())
    data = bytearray(path.read_bytes())
    data[130] ^= 1
    path.write_bytes(data)
    before = digest_tree(steps.store)
    ran = steps("gc", "--yes")
    assert (ran.code, ran.out) == (2, "")
    assert f"record {path.relative_to(steps.store)} is damaged" in ran.err
    assert digest_tree(steps.store) == before


# --- all of them


@pytest.mark.parametrize("words", [["du"], ["prune", "--keep-last", "1"], ["gc"], ["gc", "--yes"], ["repair"]])
def test_what_is_no_store_is_refused_and_left_alone(empty: Cli, words: list[str]) -> None:
    (empty.folder / "ckpts").mkdir()
    (empty.folder / "ckpts/mine.txt").write_text("mine")
    ran = empty(*words)
    assert ran.code == 2
    assert "Traceback" not in ran.err
    assert [path.name for path in empty.store.iterdir()] == ["mine.txt"]


def test_plans_work_on_a_store_that_may_not_be_written(steps: Cli, tmp_path: Path) -> None:
    before = digest_tree(steps.store)
    for path in [steps.store, *steps.store.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        for words in (["du"], ["prune", "--keep-last", "1"], ["gc"], ["gc", "--repack"], ["repair"], ["rm", "twin"]):
            assert steps(*words).code == 0
    finally:
        for path in [steps.store, *steps.store.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert before  # modes differ now; that nothing else does is tested above
