"""Rounds of a single process, and the answers of a coordinator."""

from __future__ import annotations

from holdfast.distributed.talk.rounds import Answer, RoundCall, RoundFailed, Rounds, SingleProcessRounds
from holdfast.errors import RankFailure


def test_an_answer_has_a_message_for_all_ranks_or_one_for_each() -> None:
    assert Answer(shared=[b"a", b"b"]).find_part(1) == b"ab"
    assert Answer(each=[[b"a"], [b"b", b"c"]]).find_part(1) == b"bc"
    assert Answer().find_part(0) == b""


def test_a_call_is_shown_by_kind_and_step() -> None:
    assert str(RoundCall("broadcast", "begin")) == "broadcast 'begin'"


def test_a_failed_round_names_its_ranks() -> None:
    assert str(RoundFailed([RankFailure(rank, "ValueError", "no") for rank in (2, 1)])) == "ranks 1 and 2"


def test_a_single_process_gets_its_own_messages() -> None:
    rounds: Rounds = SingleProcessRounds()

    rounds.arrive(RoundCall("all_to_all", "x"), [b"a", b"b"])
    rounds.send(0, [b"to ", b"itself"])
    collected = rounds.collect()
    rounds.answer(Answer(shared=[b"answer"]))

    assert (collected, rounds.wait_answer(), rounds.receive([0])) == ([b"ab"], b"answer", [b"to itself"])


def test_a_round_that_ended_leaves_no_message_for_the_next() -> None:
    rounds = SingleProcessRounds()
    rounds.arrive(RoundCall("barrier", "x"), [b"a"])
    rounds.send(0, [b"b"])

    rounds.finish()

    assert (rounds.wait_answer(), rounds.receive([0])) == (b"", [b""])


def test_a_single_process_knows_only_its_own_failure() -> None:
    rounds = SingleProcessRounds()
    failure = RankFailure(0, "ValueError", "no")

    assert rounds.fail(failure) == [failure]
    assert rounds.read_failures() == rounds.watch_others()() == []
