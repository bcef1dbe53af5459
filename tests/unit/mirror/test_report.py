"""What is known about uploads while they run."""

from __future__ import annotations

from holdfast.mirror.plan import MirrorPlan, MirrorRefusal
from holdfast.mirror.upload import UploadNews
from tests.unit.mirror.test_plan import snapshot


def test_a_commit_waits_until_it_was_copied() -> None:
    news, one = UploadNews("s3://b/m"), snapshot("a")
    news.add_waiting(one)
    assert (news.read().waiting, news.read().waiting_bytes) == (("a",), 100)
    news.copied(one, 60)
    state = news.read()
    assert (state.present, state.waiting, state.sent_bytes, state.is_complete) == (1, (), 60, True)
    assert news.known == {("a", one.write_id)}


def test_a_commit_after_the_look_at_the_stores_is_still_waiting() -> None:
    news = UploadNews("s3://b/m")
    news.add_waiting(snapshot("b"))
    news.planned(MirrorPlan(present=(snapshot("a"),)))
    assert news.read().waiting == ("b",)
    news.forget_fresh()
    assert news.read().waiting == ()


def test_a_name_that_was_overwritten_is_no_longer_known() -> None:
    news, one = UploadNews("s3://b/m"), snapshot("a")
    news.copied(one, 1)
    news.add_waiting(snapshot("a", "other"))
    assert news.known == frozenset()
    news.copied(one, 1)
    assert news.read().waiting == ("a",)


def test_what_is_in_doubt_is_not_known_until_all_names_were_compared() -> None:
    news, one = UploadNews("s3://b/m"), snapshot("a")
    news.copied(one, 1)
    news.add_doubts(1)
    assert news.known == frozenset()
    before = news.doubts
    news.add_doubts(1)  # while an upload runs that began before it
    news.planned(MirrorPlan(present=(one,)))
    news.add_doubts(-before)
    assert news.known == frozenset()
    news.add_doubts(-news.doubts)
    assert news.known == {("a", one.write_id)}


def test_refusals_and_errors_are_shown() -> None:
    news, one = UploadNews("s3://b/m"), snapshot("a")
    news.planned(MirrorPlan(refused=(MirrorRefusal(one, "deleted there"),)))
    news.failed(one, ValueError("broken"))
    assert (news.read().refused, news.read().last_error) == ({"a": "deleted there"}, "a: broken")


def test_progress_is_counted_and_passed_on() -> None:
    seen: list[object] = []

    class Notes:
        def begin(self, task: str, total_bytes: int) -> None:
            seen.append((task, total_bytes))

        def advance(self, num_bytes: int) -> None:
            seen.append(num_bytes)

        def end(self) -> None:
            seen.append("end")

    news = UploadNews("s3://b/m", progress=Notes())
    news.begin("copy a", 100)
    news.advance(40)
    state = news.read()
    assert (state.uploading, state.done_bytes, state.total_bytes) == ("copy a", 40, 100)
    news.end()
    assert (news.read().uploading, seen) == ("", [("copy a", 100), 40, "end"])


def test_lines_of_a_child_say_the_same() -> None:
    news = UploadNews("s3://b/m")
    news.read_line({"present": [["a", "1"]], "waiting": [["b", 7]], "refused": [["c", "deleted there"]]})
    news.read_line({"store": "the id"})
    news.read_line({"task": "copy b", "total": 7})
    news.read_line({"done": 3})
    state = news.read()
    assert (state.present, state.waiting, state.refused) == (1, ("b",), {"c": "deleted there"})
    assert (state.uploading, state.done_bytes, state.total_bytes) == ("copy b", 3, 7)
    news.read_line({"copied": ["b", "2"], "sent": 5})
    news.read_line({"failed": "d", "reason": "broken"})
    state = news.read()
    assert (state.waiting, state.sent_bytes, state.uploading, state.last_error) == ((), 5, "", "d: broken")
    assert news.store_id == "the id"
    assert news.known == {("a", "1"), ("b", "2")}
