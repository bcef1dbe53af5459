"""mirror: what it prints, what it uploads, and how it ends."""

from __future__ import annotations

from holdfast.mirror.setting import record_mirror
from holdfast.objects.local.local_store import LocalStore
from holdfast.repo.handle.repository import open_repository
from tests.cli.runs import Cli, digest_tree


def test_a_store_without_a_mirror_says_so(filled: Cli) -> None:
    assert filled.ok("mirror") == "this store has no mirror; `holdfast mirror URL --yes` makes one\n"
    assert filled("mirror", "--json").json["mirrors"] == []


def test_a_plan_is_printed_and_nothing_is_uploaded(filled: Cli) -> None:
    before = digest_tree(filled.store)
    ran = filled("mirror", "there")
    assert ran.code == 1
    assert f"{filled.folder}/there: 0 snapshots there, 3 snapshots waiting (" in ran.out
    assert "    waiting: other\n" in ran.out
    assert ran.err == "holdfast: nothing was uploaded; repeat with --yes to upload 3 snapshots\n"
    assert digest_tree(filled.store) == before
    assert not (filled.folder / "there").exists()


def test_a_mirror_is_made_and_remembered(filled: Cli) -> None:
    ran = filled("mirror", "there", "--yes")
    assert (ran.code, ran.err) == (0, "")
    assert "there: 3 snapshots there, 0 snapshots waiting (0 B), " in ran.out
    assert " sent\n" in ran.out
    assert filled.ok("-s", "there", "ls").count("run/step") == filled.ok("ls").count("run/step")
    assert "best" in filled.ok("-s", "there", "tag")
    assert "there: 3 snapshots there, 0 snapshots waiting (0 B)\n" in filled.ok("mirror")
    filled.ok("put", "new", "data/sub")
    (state,) = filled("mirror", "--json").json["mirrors"]
    assert (state["present"], state["waiting"], state["last_error"]) == (3, ["new"], "")
    assert filled("mirror").code == 1


def test_a_mirror_is_forgotten_and_kept(filled: Cli) -> None:
    filled.ok("mirror", "there", "--yes")
    ran = filled("mirror", "there", "--forget")
    assert (ran.code, ran.err) == (
        0,
        f"holdfast: {filled.folder}/there is no longer a mirror of this store; its snapshots are kept\n",
    )
    assert "no mirror" in filled.ok("mirror")
    assert "run/step-100" in filled.ok("-s", "there", "ls")
    assert "is not recorded" in filled("mirror", "there", "--forget").err
    assert "give the URL" in filled("mirror", "--forget").err


def test_prune_keeps_what_the_mirror_lacks(steps: Cli) -> None:
    steps.ok("mirror", "there", "--yes")
    steps.ok("put", "run/step-300", "data/sub")
    steps.ok("put", "run/step-400", "data/sub")
    ran = steps("prune", "run/", "--keep-last", "1", "--yes")
    assert f"not in its mirror {steps.folder}/there yet" in ran.out
    assert "deleted 4 snapshots" in ran.err
    assert "run/step-300" in steps.ok("ls")


def test_a_mirror_that_needs_options_is_not_looked_for_elsewhere(filled: Cli) -> None:
    url = "s3://bucket/m"
    record_mirror(open_repository(LocalStore(str(filled.store))), url, "all", options=("endpoint",))
    for words in (["mirror"], ["mirror", url, "--yes"]):
        ran = filled(*words)
        assert ran.code == 2
        assert "was opened with options (endpoint), which this command cannot pass" in ran.err
    kept = filled("prune", "run/", "--keep-last", "1", "--yes")
    assert "was opened with options (endpoint) that this process lacks" in kept.out
    assert "deleted 0 snapshots" in kept.err
    assert filled("mirror", url, "--forget").code == 0


def test_a_snapshot_that_was_deleted_in_the_mirror_is_not_uploaded_again(filled: Cli) -> None:
    filled.ok("mirror", "there", "--yes")
    filled.ok("-s", "there", "rm", "other", "--yes")
    ran = filled("mirror", "--yes")
    assert ran.code == 0
    assert "    not uploaded: other: it was deleted in the mirror\n" in ran.out


def test_the_store_is_not_its_own_mirror(cli: Cli) -> None:
    assert "is the store itself" in cli("mirror", str(cli.store), "--yes").err
