"""One uploader at a time."""

from __future__ import annotations

import os
import threading

from holdfast.mirror.upload import UploadTurn
from holdfast.objects.memory import MemoryStore
from holdfast.repo.handle.repository import Repository
from holdfast.repo.upkeep.check import Checker
from tests.kit.saving import save_bytes

URL = "s3://b/m"


def test_a_second_uploader_waits_for_the_first(local: Repository) -> None:
    save_bytes(local, "a", {"x": b"1"})
    order: list[str] = []
    waits = threading.Event()

    def is_stopped() -> bool:
        waits.set()
        return False

    def upload() -> None:
        with UploadTurn(local.store, URL).hold(is_stopped=is_stopped) as is_mine:
            order.append(f"second {is_mine}")

    with UploadTurn(local.store, URL).hold() as is_mine:
        assert is_mine
        assert UploadTurn(local.store, URL).is_held()
        thread = threading.Thread(target=upload)
        thread.start()
        assert waits.wait(30)
        order.append("first")
    thread.join()
    assert order == ["first", "second True"]
    assert not UploadTurn(local.store, URL).is_held()


def test_an_uploader_that_is_stopped_gets_no_turn(local: Repository) -> None:
    save_bytes(local, "a", {"x": b"1"})
    with UploadTurn(local.store, URL).hold(), UploadTurn(local.store, URL).hold(is_stopped=lambda: True) as is_mine:
        assert not is_mine


def test_mirrors_have_turns_of_their_own(local: Repository) -> None:
    save_bytes(local, "a", {"x": b"1"})
    with UploadTurn(local.store, URL).hold(), UploadTurn(local.store, "s3://b/other").hold() as is_mine:
        assert is_mine


def test_the_last_error_is_kept_until_an_upload_succeeds(local: Repository) -> None:
    save_bytes(local, "a", {"x": b"1"})
    turn = UploadTurn(local.store, URL)
    assert turn.read_note().error == ""
    turn.write_note("no such bucket")
    note = UploadTurn(local.store, URL).read_note()
    assert (note.error, note.pid) == ("no such bucket", os.getpid())
    turn.write_note("")
    assert turn.read_note().error == ""


def test_the_file_is_no_part_of_the_store(local: Repository) -> None:
    save_bytes(local, "a", {"x": b"1"})
    UploadTurn(local.store, URL).write_note("x" * 5000)
    assert all(finding.severity == "note" for finding in Checker(local.store, read=True).iter_findings())


def test_a_store_in_memory_needs_no_turn() -> None:
    turn = UploadTurn(MemoryStore(), URL)
    with turn.hold() as is_mine:
        assert is_mine
    turn.write_note("nothing is written")
    assert turn.read_note().error == ""
    assert not turn.is_held()
