"""The ranks of a group as they talk for one save or load: values travel, and a failure of one reaches all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from holdfast.distributed.talk import wire
from holdfast.distributed.talk.call_ids import CallId, join_collective, number_call
from holdfast.distributed.talk.failures import describe_error, make_error, make_lost_error
from holdfast.distributed.talk.liveness import Pace
from holdfast.distributed.talk.rounds import Answer, LoneRounds, RoundCall, RoundFailed, Rounds
from holdfast.distributed.talk.store_rounds import StoreRounds
from holdfast.distributed.talk.store_thread import StoreThread, StoreThreadLost
from holdfast.errors import RankError, RankFailure, Unsupported

Map = Callable[[], Any]
Reduce = Callable[[list[Any]], Any]
_Give = Callable[[], list[wire.Frame]]
_Reply = Callable[[list[bytes]], Answer]


class Collectives:
    """The ranks of one process group as they talk for one save or load; a world of one without a group.

    All ranks make the same calls in the same order, each named by its `step`, from one thread; two at once need two
    names, or topics. Values are plain (see `wire.encode`) and come back as copies. Whatever fails on one rank, even
    by dying, is a RankError on all of them, and the next call works again if they live. Use it in a `with`: what is
    raised inside is then told to the others.
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
        """Join the ranks of `group`, or of the default one if there is one; all must, with the same arguments.

        The n-th of a name on one rank belongs to the n-th on the others: make it before anything that can fail, so
        that no rank leaves one out. Names should be few: each leaves a small key for every rank in the store. With
        topics, of which there may be many, the n-th of a name and topic belong together: threads that come in
        another order on each rank find each other by them.

        With use_dist=False this process is a world of one, also where torch.distributed is initialised.

        Who gives no sign of life for `timeout_s` while another waits for it is given up on; `beat` gives one.
        """
        self._group = group = _find_group(group) if use_dist else None
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is no rank of the group; give a group that it belongs to")
        if not 0 <= coordinator < self.world_size or timeout_s <= 0:
            raise ValueError(f"coordinator {coordinator} of {self.world_size} ranks, timeout_s={timeout_s}: impossible")
        self.coordinator = coordinator
        self.is_coordinator = self.rank == coordinator
        self._turn = threading.Lock()
        self._step = "join"
        self._is_closed = False
        # An error that told this rank of others' while no round was under way: the next one is over.
        self._noticed: RankError | None = None
        # All ranks know of it, so it need not be told again.
        self._known: BaseException | None = None
        self._look = Pace(every_s=1.0)
        self._rounds: Rounds = LoneRounds()
        self._store: tuple[Store, str] | None = None
        if group is not None and self.world_size > 1:
            store = _find_store(group)
            line = StoreThread(store, name=f"holdfast-{name}", timeout_s=timeout_s)
            try:
                seat = self._find_seat(line, f"holdfast/{group.group_name}/{name}/", topic)
                self._store = (store, seat.prefix)
                self._rounds = StoreRounds(
                    line,
                    rank=self.rank,
                    size=self.world_size,
                    coordinator=coordinator,
                    seat=seat,
                    timeout_s=timeout_s,
                )
            except StoreThreadLost as lost:
                line.close()
                raise self._lost_error(self._step, lost) from lost

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the others what ends this rank's part, if it is an error, and leave."""
        if error is not None:
            self.fail(error, step=self._step)
        self.close()

    def __repr__(self) -> str:
        """Show which rank this is, and who coordinates."""
        coordinator = f"coordinator {self.coordinator} (rank {self.global_coordinator_rank} of the job)"
        return f"<Collectives rank {self.rank} of {self.world_size}, {coordinator}>"

    @property
    def global_ranks(self) -> list[int]:
        """What rank of the whole job each rank is."""
        return [0] if self._group is None else dist.get_process_group_ranks(self._group)

    @property
    def global_coordinator_rank(self) -> int:
        """What rank of the whole job the coordinator is."""
        return self.global_ranks[self.coordinator]

    def broadcast_object(self, value: Any, *, step: str) -> Any:
        """Return the coordinator's value."""
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
        """Return the values of all ranks, in order."""
        return self.all_gather(step, lambda: value)

    def scatter_object(self, values: Sequence[Any] | None, *, step: str) -> Any:
        """Return this rank's item of the coordinator's `values`, of which there is one for each rank."""
        return wire.decode(self._run("scatter", step, list, lambda messages: Answer(each=self._encode_each(values))))

    def all_to_all_object(self, values: Sequence[Any], *, step: str) -> list[Any]:
        """Send `values[r]` to rank r and return what came from each; b"" costs nothing."""
        return self.all_to_all(step, lambda: values)

    def all_to_all(self, step: str, map: Callable[[], Sequence[Any]]) -> list[Any]:
        """Map on every rank to one value for each; return what came from each. b"" costs nothing."""
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
        """Map on every rank, reduce all results on the coordinator to one for each rank; return this rank's."""

        def answer(messages: list[bytes]) -> Answer:
            return Answer(each=self._encode_each(reduce([wire.decode(message) for message in messages])))

        return wire.decode(self._run("reduce_scatter", step, lambda: wire.encode(map()), answer))

    def all_reduce(self, step: str, map: Map, reduce: Reduce) -> Any:
        """Map on every rank, reduce all results on the coordinator; return what that gives, on every rank."""

        def answer(messages: list[bytes]) -> Answer:
            return Answer(shared=wire.encode(reduce([wire.decode(message) for message in messages])))

        return wire.decode(self._run("all_reduce", step, lambda: wire.encode(map()), answer))

    def all_gather(self, step: str, map: Map) -> list[Any]:
        """Map on every rank; return all results, in order."""

        def answer(messages: list[bytes]) -> Answer:
            return Answer(shared=wire.encode(messages))

        packed = wire.decode(self._run("all_gather", step, lambda: wire.encode(map()), answer))
        return [wire.decode(message) for message in packed]

    def broadcast(self, step: str, map: Map) -> Any:
        """Map on the coordinator; return the result on every rank."""

        def give() -> list[wire.Frame]:
            return wire.encode(map()) if self.is_coordinator else []

        return wire.decode(
            self._run("broadcast", step, give, lambda messages: Answer(shared=[messages[self.coordinator]]))
        )

    def barrier(self, step: str = "barrier", act: Map = lambda: None) -> None:
        """Run `act` on every rank, and return when all have done so."""

        def give() -> list[wire.Frame]:
            act()
            return []

        self._run("barrier", step, give, lambda messages: Answer())

    def all_gather_keys(self, keys: Iterable[str], *, step: str) -> list[str]:
        """Return the sorted union of the keys of all ranks."""

        # As JSON, which is written and read by compiled code: there may be a hundred thousand.
        def give() -> list[wire.Frame]:
            unique = sorted(set(keys))
            if not all(isinstance(key, str) for key in unique):
                raise Unsupported("a key that is no string cannot be gathered; convert it")
            return [json.dumps(unique).encode()]

        def answer(messages: list[bytes]) -> Answer:
            union: set[str] = set()
            for message in messages:
                union.update(json.loads(message))
            return Answer(shared=[json.dumps(sorted(union)).encode()])

        return list(json.loads(self._run("all_gather_keys", step, give, answer)))

    def beat(self) -> None:
        """Give a sign of life; cheap, for whoever works long between two calls, from any thread."""
        with suppress(StoreThreadLost):  # the next call will say so
            self._rounds.beat(self._step)

    def check_failures(self) -> None:
        """Raise RankError if another rank has failed; looks at most once a second; for long work, from any thread."""
        if self._look.is_due():
            self._notice(self._rounds.find_failures)

    def watch_others(self) -> Callable[[], None]:
        """Return what raises RankError if another rank is silent for too long from now on.

        For whoever waits for others inside of a step by other means than a call: to be called often while it does.
        """
        look = self._rounds.watch_others()
        return lambda: self._notice(look)

    def make_store(self, name: str) -> Store:
        """Return a part of the group's store that belongs to these ranks alone, on a connection of its own."""
        if self._store is None:
            raise ValueError("a world of one has no store")
        place, prefix = self._store
        return PrefixStore(f"{prefix}{name}", place.clone())  # type: ignore[attr-defined]  # there, and not declared

    def _notice(self, find: Callable[[], Sequence[RankFailure]]) -> None:
        try:
            failures = find()
        except StoreThreadLost as lost:
            raise self._lost_error(self._step, lost) from lost
        if failures:
            self._noticed = self._make_error(self._step, failures)
            raise self._noticed

    def fail(self, error: BaseException, *, step: str) -> None:
        """Tell the other ranks that this one has failed, so that whoever waits for it need not; raises nothing.

        Their call under way, or their next one, raises RankError. What they know already is not told again.
        """
        self._catch_up()
        if self._is_closed or (self._known is not None and _comes_from(error, self._known)):
            return
        self._step = step
        self._known = error
        with suppress(StoreThreadLost):
            self._rounds.fail(describe_error(self.rank, error))

    def close(self) -> None:
        """Leave; whoever still waits for this rank is told. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._rounds.close()

    def _find_seat(self, line: StoreThread, base: str, topic: str | None) -> CallId:
        if topic is None:
            return line.call(lambda store: number_call(store, base, rank=self.rank))
        # Found out here: the line has a thread of its own.
        is_main = threading.current_thread() is threading.main_thread()
        base += "on/"
        return line.call(
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
        """Take this rank through one round; whatever goes wrong in it goes wrong on all ranks."""
        if self._is_closed:
            raise ValueError(f"step {step!r}: these Collectives are closed; make new ones")
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(
                f"step {step!r}: {self._step!r} is under way; Collectives of another name can run beside"
            )
        try:
            self._catch_up()
            self._step = step
            # Before this rank's part, so that a rank that dies in it was last seen in this step.
            self._rounds.beat(step)
            yield RoundCall(kind, step)
            self._rounds.finish()
        except RoundFailed as failed:
            self._rounds.finish()
            self._known = self._make_error(step, failed.failures)
            raise self._known from None
        except StoreThreadLost as lost:
            self._known = self._lost_error(step, lost)
            raise self._known from lost
        except BaseException as error:
            self._end(step, error)
            raise
        finally:
            self._noticed = None
            self._turn.release()

    def _end(self, step: str, error: BaseException) -> None:
        """End the round under way by an error of this rank; raise what this rank is to see, if not the error itself."""
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
        self._known = error
        if isinstance(error, Exception):
            self._known = self._make_error(step, failures)
            raise self._known from error

    def _catch_up(self) -> None:
        if self._noticed is not None:
            self._rounds.finish()
            self._known, self._noticed = self._noticed, None

    def _encode_each(self, values: Sequence[Any] | None) -> list[list[wire.Frame]]:
        if values is None or len(values) != self.world_size:
            given = "none" if values is None else len(values)
            raise ValueError(f"there are {self.world_size} ranks and {given} values; give one for each rank")
        return [wire.encode(value) for value in values]

    def _transpose(self, messages: list[bytes]) -> Answer:
        sources: list[list[int]] = [[] for _ in messages]
        for source, message in enumerate(messages):
            for target in wire.decode(message):
                sources[target].append(source)
        return Answer(each=[wire.encode(ranks) for ranks in sources])

    def _make_error(self, step: str, failures: Sequence[RankFailure]) -> RankError:
        return make_error(step, failures, rank=self.rank, world_size=self.world_size)

    def _lost_error(self, step: str, lost: StoreThreadLost) -> RankError:
        return make_lost_error(step, str(lost), rank=self.rank, world_size=self.world_size)


def _find_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group that is given, else the default one, if there is one."""
    is_given = group is not None or not (dist.is_available() and dist.is_initialized())
    return group if is_given else dist.group.WORLD


def _find_store(group: dist.ProcessGroup) -> Store:
    store: Store | None = group.get_group_store()
    if store is None:
        raise Unsupported(f"group {group.group_name!r} has no store (MPI has none); give a gloo or NCCL group")
    return store


def _is_empty(value: object) -> bool:
    return type(value) is bytes and not value


def _comes_from(error: BaseException, origin: BaseException) -> bool:
    """Tell whether `error` is `origin`, or was raised because of it or while it was handled."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if link is origin:
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False
