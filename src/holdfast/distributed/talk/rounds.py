"""Rounds: every rank of a group arrives with a message, the coordinator answers, and one verdict holds for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.distributed.talk.failures import name_ranks
from holdfast.distributed.talk.wire import Frame
from holdfast.errors import RankFailure


class RoundFailed(Exception):
    """The verdict on a round: it has failed on every rank."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        super().__init__(name_ranks(one.rank for one in failures))
        self.failures = failures


@dataclass(frozen=True, slots=True)
class RoundCall:
    """What a rank takes part in; all ranks of one round must agree."""

    kind: str
    step: str

    def __str__(self) -> str:
        """Return what a person would call it."""
        return f"{self.kind} {self.step!r}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the coordinator gives back: one message to all, or one to each rank; nothing to anybody by default."""

    shared: Sequence[Frame] | None = None
    each: Sequence[Sequence[Frame]] | None = None

    def find_part(self, rank: int) -> bytes:
        """Return what is for `rank`."""
        if self.each is not None:
            return b"".join(self.each[rank])
        return b"".join(self.shared or ())


class Rounds(Protocol):
    """One round after the other; `fail` ends the round under way, or the next one, for all ranks."""

    def arrive(self, call: RoundCall, message: Sequence[Frame]) -> None:
        """Tell that this rank takes part, and what it brings."""

    def send(self, rank: int, message: Sequence[Frame]) -> None:
        """Leave a message for one rank, to be received once this round is answered."""

    def collect(self) -> list[bytes]:
        """Wait for all and return what they bring; on the coordinator."""

    def answer(self, answer: Answer) -> None:
        """Give the verdict that the round has succeeded, and what it brings; on the coordinator."""

    def wait_answer(self) -> bytes:
        """Wait for the verdict and return this rank's part of the answer."""

    def receive(self, ranks: Sequence[int]) -> list[bytes]:
        """Return what these ranks have left for this one."""

    def finish(self) -> None:
        """End the round under way on this rank."""

    def fail(self, failure: RankFailure) -> list[RankFailure]:
        """End it by a failure; return all failures that are known."""

    def find_failures(self) -> list[RankFailure]:
        """Return the failures that have ended the round under way, or the next one; empty while it goes on."""

    def watch_others(self) -> Callable[[], list[RankFailure]]:
        """Return what tells, if called often, who fails or is silent for too long from now on; that ends the round."""

    def beat(self, step: str) -> None:
        """Give a sign of life, if it is time or the step is a new one."""

    def close(self) -> None:
        """Leave."""


class LoneRounds:
    """The rounds of a world of one: what is brought comes back, through the same steps."""

    def __init__(self) -> None:
        self._message = b""
        self._sent = b""

    def arrive(self, call: RoundCall, message: Sequence[Frame]) -> None:
        """Keep the message."""
        self._message = b"".join(message)

    def send(self, rank: int, message: Sequence[Frame]) -> None:
        """Keep the message apart."""
        self._sent = b"".join(message)

    def collect(self) -> list[bytes]:
        """Return the message."""
        return [self._message]

    def answer(self, answer: Answer) -> None:
        """Keep the answer."""
        self._message = answer.find_part(0)

    def wait_answer(self) -> bytes:
        """Return the answer."""
        return self._message

    def receive(self, ranks: Sequence[int]) -> list[bytes]:
        """Return what was sent."""
        return [self._sent for _ in ranks]

    def finish(self) -> None:
        """Forget what was brought."""
        self._message = self._sent = b""

    def fail(self, failure: RankFailure) -> list[RankFailure]:
        """Return the failure: nobody else has any."""
        self.finish()
        return [failure]

    def find_failures(self) -> list[RankFailure]:
        """Return nothing: who would fail elsewhere?"""
        return []

    def watch_others(self) -> Callable[[], list[RankFailure]]:
        """Return what finds nobody."""
        return list

    def beat(self, step: str) -> None:
        """Do nothing: nobody waits."""

    def close(self) -> None:
        """Do nothing."""
