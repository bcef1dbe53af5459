"""One pass of uploads: whatever happens in between, the next pass completes the mirror."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.compile_cache.artifacts.artifact import read_artifact
from holdfast.compile_cache.artifacts.catalog import iter_variants
from holdfast.compile_cache.artifacts.trust import Trust
from holdfast.errors import StoreError
from holdfast.mirror.setting import MirrorSetting
from holdfast.mirror.upload import UploadJob, UploadNews, UploadTurn, upload_all
from holdfast.objects.memory import MemoryStore
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.format.layout import PACKS
from holdfast.repo.handle.repository import Repository, open_repository
from holdfast.repo.names.snapshots import read_tag, set_tag
from holdfast.repo.upkeep.check import Checker
from tests.kit.compile_artifacts import SECRET, make_artifact, make_key, store_artifact
from tests.kit.s3_server import Fault, Request, S3Server
from tests.kit.saving import MIB, load_bytes, new_repo, noise, pack_of, rot, save_bytes, snapshot_of

CONTENT = {"w": noise(3 * MIB, 1), "tiny": b"inline"}


def upload(local: Repository, target: Repository) -> UploadNews:
    news = UploadNews(target.store.url)
    upload_all(UploadJob(local, target), news)
    return news


def is_clean(store: ObjectStore) -> bool:
    return all(finding.severity == "note" for finding in Checker(store, read=True).iter_findings())


def test_names_metadata_times_and_tags_are_the_same_on_both_sides(local: Repository, setting: MirrorSetting) -> None:
    save_bytes(local, "run/1", CONTENT, metadata={"loss": 0.5}, spec=["tree"])
    tag = set_tag(local.store, "best", snapshot_of(local, "run/1"))
    there = setting.open(local.budget_bytes)
    news = upload(local, there)
    one, other = snapshot_of(local, "run/1"), snapshot_of(there, "run/1")
    assert (one.digest, one.metadata, one.time_s) == (other.digest, other.metadata, other.time_s)
    assert load_bytes(there, "run/1") == CONTENT
    assert read_tag(there.store, "best") == tag
    assert (news.read().present, news.read().waiting, news.read().sent_bytes) == (1, (), 3 * MIB + 6)
    assert is_clean(there.store)


def test_what_is_saved_during_an_upload_is_uploaded_too(local: Repository, setting: MirrorSetting) -> None:
    save_bytes(local, "a", {"x": b"1"})

    class SavesMeanwhile(UploadNews):
        def copied(self, snapshot: object, sent_bytes: int) -> None:
            if getattr(snapshot, "name", "") == "a":
                save_bytes(local, "b", {"x": b"2"})

    there = setting.open(local.budget_bytes)
    upload_all(UploadJob(local, there), SavesMeanwhile(setting.url))
    assert load_bytes(there, "b") == {"x": b"2"}


def test_an_overwritten_name_is_overwritten_in_the_mirror(local: Repository, setting: MirrorSetting) -> None:
    there = setting.open(local.budget_bytes)
    save_bytes(local, "a", {"x": b"1"})
    upload(local, there)
    save_bytes(local, "a", {"x": b"2"}, overwrite=True)
    upload(local, there)
    assert load_bytes(there, "a") == {"x": b"2"}


def test_a_damaged_snapshot_does_not_hold_up_the_others(local: Repository, setting: MirrorSetting) -> None:
    save_bytes(local, "bad", CONTENT)
    at = pack_of(local, "bad", "w")
    rot(local.store, f"packs/{at.pack_id}", at.offset + 7)
    save_bytes(local, "good", {"x": noise(1000, 5)})
    there = setting.open(local.budget_bytes)
    news = upload(local, there)
    assert "'bad'" in news.read().last_error
    assert news.read().waiting == ("bad",)
    assert load_bytes(there, "good") == {"x": noise(1000, 5)}
    assert "'bad'" in UploadTurn(local.store, setting.url).read_note().error


def test_a_store_in_memory_can_be_mirrored(setting: MirrorSetting) -> None:
    repo = new_repo(MemoryStore())
    save_bytes(repo, "a", CONTENT)
    there = setting.open(repo.budget_bytes)
    upload(repo, there)
    assert load_bytes(there, "a") == CONTENT


def test_a_second_pass_sends_nothing(local: Repository, bucket: MirrorSetting, server: S3Server) -> None:
    save_bytes(local, "a", CONTENT)
    upload(local, bucket.open(local.budget_bytes))
    before = len(server.requests)
    upload(local, bucket.open(local.budget_bytes))
    asked = server.requests[before:]
    assert not [each for each in asked if each.kind == "PUT"]
    assert len(asked) <= 6


def fail_once(fault: Fault, kind: str, below: str) -> object:
    """Return a function that lets the server do one thing wrong, the first time a request fits."""
    done: list[Request] = []

    def find_fault(request: Request) -> Fault | None:
        if request.kind == kind and below in request.key and not done:
            done.append(request)
            return fault
        return None

    return find_fault


@pytest.mark.parametrize("fault", ["lose reply", "lose request", "503 before", "503 after"])
@pytest.mark.parametrize("below", [PACKS, "snapshots/", "manifests/"])
def test_a_request_that_goes_wrong_is_repaired(
    fault: Fault, below: str, local: Repository, bucket: MirrorSetting, server: S3Server
) -> None:
    save_bytes(local, "a", CONTENT)
    server.fault_of = fail_once(fault, "PUT", below)  # type: ignore[assignment]  # a function
    there = bucket.open(local.budget_bytes)
    upload(local, there)
    assert load_bytes(there, "a") == CONTENT
    assert is_clean(there.store)


def test_a_pass_that_was_refused_is_completed_by_the_next(
    local: Repository, bucket: MirrorSetting, server: S3Server
) -> None:
    save_bytes(local, "a", CONTENT)
    server.fault_of = lambda request: "403" if request.kind == "PUT" and "snapshots/" in request.key else None
    with pytest.raises(StoreError):
        upload(local, bucket.open(local.budget_bytes))
    assert UploadTurn(local.store, bucket.url).read_note().error
    sent = server.count("PUT", PACKS)

    server.fault_of = lambda request: None
    upload(local, bucket.open(local.budget_bytes))
    # The probe of the server creates its first object twice.
    assert server.count("PUT", PACKS) == sent
    assert load_bytes(bucket.open(local.budget_bytes), "a") == CONTENT
    assert UploadTurn(local.store, bucket.url).read_note().error == ""


def test_an_upload_that_is_stopped_leaves_the_rest(local: Repository, setting: MirrorSetting) -> None:
    save_bytes(local, "a", {"x": b"1"})
    save_bytes(local, "b", {"x": b"2"})
    there = setting.open(local.budget_bytes)
    news = UploadNews(setting.url)
    upload_all(UploadJob(local, there, is_stopped=lambda: bool(news.known)), news)
    assert (news.read().present, len(news.read().waiting)) == (1, 1)


@pytest.mark.parametrize("known_in", ["", "another store"])
def test_what_is_known_of_another_store_is_not_relied_on(
    known_in: str, local: Repository, setting: MirrorSetting
) -> None:
    save_bytes(local, "a", {"x": b"1"})
    known = frozenset({("a", snapshot_of(local, "a").write_id)})
    there = setting.open(local.budget_bytes)
    save_bytes(there, "b", {"x": b"2"})
    news = UploadNews(setting.url)
    upload_all(UploadJob(local, there, known=known, known_in=known_in), news)
    assert load_bytes(there, "a") == {"x": b"1"}
    assert news.store_id == there.identity.store_id


def test_signed_graphs_keep_their_signature(local: Repository, bucket: MirrorSetting) -> None:
    store_artifact(local, make_artifact(), secret=SECRET)
    there = bucket.open(local.budget_bytes)
    upload(local, there)
    (variant,) = iter_variants(there.store, make_key().digest)
    assert read_artifact(there, variant, trust=Trust(SECRET)).graph == b"graph"


def test_a_graph_gets_the_next_free_number(local: Repository, setting: MirrorSetting) -> None:
    there = setting.open(local.budget_bytes)
    store_artifact(there, make_artifact(guards="s0 < 9", graph=b"other"))
    store_artifact(local, make_artifact(), secret=SECRET)
    news = upload(local, there)
    assert news.read().is_complete
    assert [each.guards for each in iter_variants(there.store, make_key().digest)] == ["s0 < 9", ""]


def test_a_newer_snapshot_of_another_machine_is_not_replaced(local: Repository, setting: MirrorSetting) -> None:
    there = setting.open(local.budget_bytes)
    save_bytes(local, "a", {"x": b"old"})
    save_bytes(there, "a", {"x": b"new"})
    news = upload(local, there)
    assert "saved later" in news.read().refused["a"]
    assert load_bytes(there, "a") == {"x": b"new"}


def test_a_mirror_of_single_saves_gets_nothing_else(local: Repository, setting: MirrorSetting) -> None:
    save_bytes(local, "a", {"x": b"1"})
    named = replace(setting, scope="named")
    there = named.open(local.budget_bytes)
    upload_all(UploadJob(open_repository(local.store), there, "named"), UploadNews(setting.url))
    assert there.store.list("snapshots/") == []
