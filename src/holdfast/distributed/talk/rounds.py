"""Rounds: each rank of a group sends the coordinator a message, it answers, and all ranks see the same verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.distributed.talk.failures import name_ranks
from holdfast.distributed.talk.wire import Frame
from holdfast.errors import RankFailure


class RoundFailed(Exception):
    """The round has failed, on every rank."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        super().__init__(name_ranks(one.rank for one in failures))
        self.failures = failures


@dataclass(frozen=True, slots=True)
class RoundCall:
    """What a rank calls in a round; it must be the same on all ranks."""

    kind: str
    step: str

    def __str__(self) -> str:
        """Return kind and step, for messages."""
        return f"{self.kind} {self.step!r}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The coordinator's answer: one message for all ranks, or one for each rank; by default, none."""

    shared: Sequence[Frame] | None = None
    each: Sequence[Sequence[Frame]] | None = None

    def find_part(self, rank: int) -> bytes:
        """Return the message for `rank`."""
        if self.each is not None:
            return b"".join(self.each[rank])
        return b"".join(self.shared or ())


class Rounds(Protocol):
    """Runs one round after the other; `fail` ends the current round, or the next one, on all ranks."""

    def arrive(self, call: RoundCall, message: Sequence[Frame]) -> None:
        """Join the round, with a message for the coordinator."""

    def send(self, rank: int, message: Sequence[Frame]) -> None:
        """Write a message for one rank, which receives it after the coordinator has answered."""

    def collect(self) -> list[bytes]:
        """Wait for all ranks and return their messages, by rank; call it on the coordinator."""

    def answer(self, answer: Answer) -> None:
        """Declare that the round has succeeded and send the answer; call it on the coordinator."""

    def wait_answer(self) -> bytes:
        """Wait for the verdict and return the answer for this rank."""

    def receive(self, ranks: Sequence[int]) -> list[bytes]:
        """Return the messages that these ranks sent to this one."""

    def finish(self) -> None:
        """End the current round on this rank."""

    def fail(self, failure: RankFailure) -> list[RankFailure]:
        """End the round with a failure; return all known failures."""

    def read_failures(self) -> list[RankFailure]:
        """Return the failures that have ended the current round, or the next one; empty if it has not failed."""

    def watch_others(self) -> Callable[[], list[RankFailure]]:
        """Return a function that, called often, returns the ranks that are silent for too long and ends the round."""

    def beat(self, step: str) -> None:
        """Give a sign of life, if one is due or the step is new."""

    def close(self) -> None:
        """Leave the rounds."""


class SingleProcessRounds:
    """The rounds of a `Collectives` with a single process: they return its own messages.

    Values are encoded and decoded as with several ranks, so that code behaves the same on one rank.
    """

    def __init__(self) -> None:
        self._message = b""
        self._sent = b""

    def arrive(self, call: RoundCall, message: Sequence[Frame]) -> None:
        """Keep the message."""
        self._message = b"".join(message)

    def send(self, rank: int, message: Sequence[Frame]) -> None:
        """Keep the message for `receive`."""
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
        """Return the message that was sent."""
        return [self._sent for _ in ranks]

    def finish(self) -> None:
        """Drop the messages of this round."""
        self._message = self._sent = b""

    def fail(self, failure: RankFailure) -> list[RankFailure]:
        """Return the failure: there are no other ranks."""
        self.finish()
        return [failure]

    def read_failures(self) -> list[RankFailure]:
        """Return an empty list: there are no other ranks."""
        return []

    def watch_others(self) -> Callable[[], list[RankFailure]]:
        """Return a function that finds no failures."""
        return list

    def beat(self, step: str) -> None:
        """Do nothing: no other rank waits."""

    def close(self) -> None:
        """Do nothing."""
