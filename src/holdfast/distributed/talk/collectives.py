"""`Collectives`: collective calls between the ranks of a process group, for one save or load."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store
from typing_extensions import Self

from holdfast.distributed.talk import wire
from holdfast.distributed.talk.call_ids import CallId, Pace, join_collective, number_call
from holdfast.distributed.talk.failures import describe_error, make_error, make_lost_error
from holdfast.distributed.talk.rounds import Answer, RoundCall, RoundFailed, Rounds, SingleProcessRounds
from holdfast.distributed.talk.store_rounds import StoreRounds, StoreThread, StoreThreadLost, connect_again
from holdfast.errors import RankError, RankFailure, Unsupported
from holdfast.repo.write.world import GatherStep
from holdfast.texts import add_note

Map = Callable[[], Any]
Reduce = Callable[[list[Any]], Any]
_Give = Callable[[], list[wire.Frame]]
"""Makes the message of this rank to the coordinator."""
_Reply = Callable[[list[bytes]], Answer]
"""Makes the coordinator's answer from the messages of all ranks."""


class Collectives:
    """Collective calls between the ranks of one process group, for one save or load; without a group, a single process.

    All ranks must make the same calls in the same order, from one thread; `step` names each call. To make two calls at
    the same time, use two `Collectives` with different names or topics. Values are plain (see `wire.encode`) and are
    returned as copies. If one rank fails or dies, all ranks raise RankError. What is not an Exception, such as
    KeyboardInterrupt and SystemExit, is raised as it is on its own rank, after the others were told. The next call
    works again if all ranks are alive. Use it in a `with`: an error raised inside is then reported to the other ranks.

    Saves and loads use `broadcast`, `gathering`, `all_gather`, `all_reduce`, `all_to_all` and `barrier`. The methods
    that end in `_object`, `reduce_scatter` and `all_gather_keys` are for users only: they replace those of torch's
    `_DistWrapper` (docs/coming-from-pytorch.md).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        coordinator: int = 0,
        timeout_s: float = 300.0,
        name: str = "main",
        topic: str | None = None,
        use_dist: bool = True,
    ) -> None:
        """Join the ranks of `group`, or of the default group if there is one; all ranks must, with the same arguments.

        The n-th instance of a name belongs to the n-th on the other ranks, so create it before anything that can fail.

        Args:
            group: the process group; None for the default group.
            coordinator: the rank, within the group, that collects messages and answers.
            timeout_s: how long a rank may give no sign of life (see `beat`) while another waits; then the call fails.
            name: what the instance is for. Use few names: each leaves a small key per rank in the group's store.
            topic: if set, instances are counted per topic, so that threads may join in a different order on each rank.
            use_dist: False to act as a single process even if torch.distributed is initialised.
        """
        self._group = group = _find_group(group) if use_dist else None
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a rank of the group; pass a group that it belongs to")
        if not 0 <= coordinator < self.world_size:
            raise ValueError(f"coordinator={coordinator}: must be a rank of the group, 0 to {self.world_size - 1}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: must be positive")
        self.coordinator = coordinator
        self.is_coordinator = self.rank == coordinator
        self._lock = threading.Lock()
        self._step = "join"
        self._is_closed = False
        # Raised by `check_failures` or a watch, outside of a round. It has already ended the current round.
        self._noticed: RankError | None = None
        # The last error that all ranks know of. It is not reported again.
        self._known: BaseException | None = None
        self._check_pace = Pace(every_s=1.0)
        self._rounds: Rounds = SingleProcessRounds()
        self._store: tuple[Store, str] | None = None
        if group is not None and self.world_size > 1:
            store = find_store(group)
            thread = StoreThread(store, name=f"holdfast-{name}", timeout_s=timeout_s)
            try:
                call_id = self._assign_call_id(thread, f"holdfast/{group.group_name}/{name}/", topic)
                self._store = (store, call_id.prefix)
                self._rounds = StoreRounds(
                    thread,
                    rank=self.rank,
                    size=self.world_size,
                    coordinator=coordinator,
                    call_id=call_id,
                    timeout_s=timeout_s,
                )
            except StoreThreadLost as lost:
                thread.close()
                raise self._make_lost_error(self._step, lost) from lost

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report an error of this rank to the other ranks, if there is one, and close."""
        if error is not None:
            self.fail(error, step=self._step)
        self.close()

    def __repr__(self) -> str:
        """Show the rank, the number of ranks and the coordinator."""
        coordinator = f"coordinator {self.coordinator} (rank {self.global_coordinator_rank} of the job)"
        return f"<Collectives rank {self.rank} of {self.world_size}, {coordinator}>"

    @property
    def global_ranks(self) -> list[int]:
        """The global rank (in the default group) of each rank of this group."""
        return [0] if self._group is None else dist.get_process_group_ranks(self._group)

    @property
    def global_coordinator_rank(self) -> int:
        """The global rank (in the default group) of the coordinator."""
        return self.global_ranks[self.coordinator]

    def broadcast_object(self, value: Any, *, step: str) -> Any:
        """Return the coordinator's value on every rank."""
        return self.broadcast(step, lambda: value)

    def gather_object(self, value: Any, *, step: str) -> list[Any] | None:
        """Return the values of all ranks on the coordinator, None elsewhere."""
        received: list[Any] = []

        def keep(messages: list[bytes]) -> Answer:
            received.extend(map(wire.decode, messages))
            return Answer()

        self._run("gather", step, lambda: wire.encode(value), keep)
        return received if self.is_coordinator else None

    def all_gather_object(self, value: Any, *, step: str) -> list[Any]:
        """Return the values of all ranks, by rank."""
        return self.all_gather(step, lambda: value)

    def scatter_object(self, values: Sequence[Any] | None, *, step: str) -> Any:
        """Return this rank's item of the coordinator's `values`, which has one item per rank."""
        return wire.decode(self._run("scatter", step, list, lambda messages: Answer(each=self._encode_each(values))))

    def all_to_all_object(self, values: Sequence[Any], *, step: str) -> list[Any]:
        """Send `values[r]` to rank r; return the values received, by rank. An empty b"" is not sent."""
        return self.all_to_all(step, lambda: values)

    def all_to_all(self, step: str, map: Callable[[], Sequence[Any]]) -> list[Any]:
        """Call `map` on every rank for one value per rank; return the values received, by rank. b"" is not sent."""
        with self._round("all_to_all", step) as call:
            values = map()
            targets = [rank for rank in range(len(values)) if not _is_empty(values[rank])]
            messages = self._encode_each(values)
            for rank in targets:
                self._rounds.send(rank, messages[rank])
                self._rounds.beat(step)
            sources = wire.decode(self._exchange(call, wire.encode(targets), self._transpose))
            received = dict(zip(sources, self._rounds.receive(sources), strict=True))
        return [wire.decode(received[rank]) if rank in received else b"" for rank in range(self.world_size)]

    def reduce_scatter(self, step: str, map: Map, reduce: Reduce) -> Any:
        """Call `map` on every rank, and `reduce` on the coordinator for one value per rank; return this rank's."""

        def answer(messages: list[bytes]) -> Answer:
            return Answer(each=self._encode_each(reduce([wire.decode(message) for message in messages])))

        return wire.decode(self._run("reduce_scatter", step, lambda: wire.encode(map()), answer))

    def all_reduce(self, step: str, map: Map, reduce: Reduce) -> Any:
        """Call `map` on every rank and `reduce` all results on the coordinator; return its value on every rank."""

        def answer(messages: list[bytes]) -> Answer:
            return Answer(shared=wire.encode(reduce([wire.decode(message) for message in messages])))

        return wire.decode(self._run("all_reduce", step, lambda: wire.encode(map()), answer))

    def all_gather(self, step: str, map: Map) -> list[Any]:
        """Call `map` on every rank; return all results, by rank."""
        with self.gathering(step) as gathering:
            gathering.given = map()
        return gathering.values

    @contextmanager
    def gathering(self, step: str) -> Iterator[GatherStep]:
        """Make the body of the `with` a step of all ranks; at its end, each rank has the values of all."""
        gathering = GatherStep()
        with self._round("all_gather", step) as call:
            yield gathering
            message = wire.encode(gathering.given)
            packed = wire.decode(self._exchange(call, message, lambda given: Answer(shared=wire.encode(given))))
        gathering.values = [wire.decode(message) for message in packed]

    def broadcast(self, step: str, map: Map) -> Any:
        """Call `map` on the coordinator; return its result on every rank."""

        def give() -> list[wire.Frame]:
            return wire.encode(map()) if self.is_coordinator else []

        return wire.decode(
            self._run("broadcast", step, give, lambda messages: Answer(shared=[messages[self.coordinator]]))
        )

    def barrier(self, step: str = "barrier", act: Map = lambda: None) -> None:
        """Call `act` on every rank; return when it has ended on all of them."""
        with self.step(step):
            act()

    @contextmanager
    def step(self, step: str) -> Iterator[None]:
        """Make the body of the `with` a step of all ranks; it ends when all of them have ended it."""
        with self._round("barrier", step) as call:
            yield
            self._exchange(call, [], lambda messages: Answer())

    def all_gather_keys(self, keys: Iterable[str], *, step: str) -> list[str]:
        """Return the sorted union of the keys of all ranks."""

        # JSON is encoded and decoded in C, and there may be 100,000 keys.
        def give() -> list[wire.Frame]:
            unique = sorted(set(keys))
            if not all(isinstance(key, str) for key in unique):
                raise Unsupported("all_gather_keys accepts only keys of type str; convert the others")
            return [json.dumps(unique).encode()]

        def answer(messages: list[bytes]) -> Answer:
            union: set[str] = set()
            for message in messages:
                union.update(json.loads(message))
            return Answer(shared=[json.dumps(sorted(union)).encode()])

        return list(json.loads(self._run("all_gather_keys", step, give, answer)))

    def beat(self) -> None:
        """Give a sign of life. It is cheap: call it often during long work, from any thread."""
        with suppress(StoreThreadLost):  # the next call raises it
            self._rounds.beat(self._step)

    def check_failures(self) -> None:
        """Raise RankError if another rank has failed. Checks at most once a second; call it from any thread."""
        if self._check_pace.is_due():
            self._notice(self._rounds.read_failures)

    def watch_others(self) -> Callable[[], None]:
        """Return a function that raises RankError if another rank gives no sign of life for `timeout_s` from now on.

        Call it often while a step waits for other ranks by means other than these calls.
        """
        read_silent = self._rounds.watch_others()
        return lambda: self._notice(read_silent)

    def make_store(self, name: str) -> Store:
        """Return a view of the group's store with a key prefix of its own, on a new connection."""
        if self._store is None:
            raise ValueError("a single process has no store")
        store, prefix = self._store
        return PrefixStore(f"{prefix}{name}", connect_again(store))

    def _notice(self, read: Callable[[], Sequence[RankFailure]]) -> None:
        try:
            failures = read()
        except StoreThreadLost as lost:
            raise self._make_lost_error(self._step, lost) from lost
        if failures:
            self._noticed = self._make_error(self._step, failures)
            raise self._noticed

    def fail(self, error: BaseException, *, step: str) -> None:
        """Report to the other ranks that this one has failed, so that they do not wait for it; raises nothing.

        Their current or next call raises RankError. An error that they already know of is not reported again.
        """
        self._catch_up()
        if self._is_closed or (self._known is not None and _comes_from(error, self._known)):
            return
        self._step = step
        self._known = error
        with suppress(StoreThreadLost):
            self._rounds.fail(describe_error(self.rank, error))

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one raise RankError. May be called more than once."""
        if not self._is_closed:
            self._is_closed = True
            self._rounds.close()

    def _assign_call_id(self, thread: StoreThread, base: str, topic: str | None) -> CallId:
        if topic is None:
            return thread.call(lambda store: number_call(store, base, rank=self.rank))
        # Must be read here: the lambda runs on the store thread.
        is_main = threading.current_thread() is threading.main_thread()
        base += "on/"
        return thread.call(
            lambda store: join_collective(store, base, topic, rank=self.rank, size=self.world_size, is_main=is_main)
        )

    def _run(self, kind: str, step: str, give: _Give, reply: _Reply) -> bytes:
        with self._round(kind, step) as call:
            return self._exchange(call, give(), reply)

    def _exchange(self, call: RoundCall, message: list[wire.Frame], reply: _Reply) -> bytes:
        self._rounds.arrive(call, message)
        if self.is_coordinator:
            self._rounds.answer(reply(self._rounds.collect()))
        return self._rounds.wait_answer()

    @contextmanager
    def _round(self, kind: str, step: str) -> Iterator[RoundCall]:
        """Run one round; an error inside of it is raised on all ranks."""
        if self._is_closed:
            raise ValueError(f"step {step!r}: this Collectives is closed; create a new one")
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"step {step!r}: step {self._step!r} is still running; use a Collectives with another name to run both"
            )
        try:
            self._catch_up()
            self._step = step
            # Beat before the work: if this rank dies in it, the others report that it was last seen in this step.
            self._rounds.beat(step)
            yield RoundCall(kind, step)
            self._rounds.finish()
        except RoundFailed as failed:
            self._rounds.finish()
            self._known = self._make_error(step, failed.failures)
            raise self._known from None
        except StoreThreadLost as lost:
            self._known = self._make_lost_error(step, lost)
            raise self._known from lost
        except BaseException as error:
            self._end(step, error)
            raise
        finally:
            self._noticed = None
            self._lock.release()

    def _end(self, step: str, error: BaseException) -> None:
        """End the current round with an error of this rank; raise a RankError that replaces it, if one does."""
        noticed = self._noticed
        if noticed is not None and _comes_from(error, noticed):
            self._rounds.finish()
            self._known = error
            if isinstance(error, Exception) and error is not noticed:
                self._known = RankError(str(noticed), step=step, failures=noticed.failures)
                raise self._known from error
            return
        own = describe_error(self.rank, error)
        failures = [own]
        with suppress(StoreThreadLost):
            failures = self._rounds.fail(own)
            if not isinstance(error, Exception) and self.world_size > 1:
                add_note(error, f"step {step!r}: the other ranks were told, and raise RankError")
        self._known = error
        # Others, such as KeyboardInterrupt, stay as they are: a RankError could be caught by accident.
        if isinstance(error, Exception):
            self._known = self._make_error(step, failures)
            raise self._known from error

    def _catch_up(self) -> None:
        """Finish the round that a failure noticed outside of it has ended."""
        if self._noticed is not None:
            self._rounds.finish()
            self._known, self._noticed = self._noticed, None

    def _encode_each(self, values: Sequence[Any] | None) -> list[list[wire.Frame]]:
        if values is None or len(values) != self.world_size:
            given = "none" if values is None else len(values)
            raise ValueError(f"there are {self.world_size} ranks and {given} values; pass one value per rank")
        return [wire.encode(value) for value in values]

    def _transpose(self, messages: list[bytes]) -> Answer:
        """Turn the targets of each rank into the sources of each rank, so that a rank knows what to wait for."""
        sources: list[list[int]] = [[] for _ in messages]
        for source, message in enumerate(messages):
            for target in wire.decode(message):
                sources[target].append(source)
        return Answer(each=[wire.encode(ranks) for ranks in sources])

    def _make_error(self, step: str, failures: Sequence[RankFailure]) -> RankError:
        return make_error(step, failures, rank=self.rank, world_size=self.world_size)

    def _make_lost_error(self, step: str, lost: StoreThreadLost) -> RankError:
        return make_lost_error(step, str(lost), rank=self.rank, world_size=self.world_size)


def _find_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return `group`; if it is None, return the default group, or None if torch.distributed is not initialised."""
    has_no_default = not (dist.is_available() and dist.is_initialized())
    return group if group is not None or has_no_default else dist.group.WORLD


def find_store(group: dist.ProcessGroup) -> Store:
    """Return the store through which the ranks of a group meet; raises Unsupported if it has none."""
    # Some versions of torch have only the one, some only the other.
    find = getattr(group, "get_group_store", None) or partial(_get_process_group_store, group)
    store: Store | None = find()
    if store is None:
        raise Unsupported(f"group {group.group_name!r} has no store (MPI groups have none); pass a gloo or NCCL group")
    return store


def _is_empty(value: object) -> bool:
    return type(value) is bytes and not value


def _comes_from(error: BaseException, origin: BaseException) -> bool:
    """Return whether `error` is `origin`, or was raised because of it or while it was handled."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if link is origin:
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False
