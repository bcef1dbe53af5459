"""What a run needs besides model and optimizer to resume exactly: RNG state and data position."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from holdfast.errors import HoldfastError, Mismatch
from holdfast.trees.apply import find_accelerator

_WORDS: Final = np.dtype("<u4")
_MAX_SEED: Final = 1 << 64


class RngState:
    """The state of the random generators of this process: Python's, numpy's and torch's.

    The state contains numbers and bytes, never tensors, so loading cannot move it to a device. Reading it draws no
    random numbers. Generators that you created are not included: save their `get_state()` as well.
    """

    def __init__(self, *, cuda: bool = True) -> None:
        """With `cuda` (the default), include the generators of every accelerator."""
        self._cuda = cuda

    def __repr__(self) -> str:
        """Show which generators it covers."""
        return f"<RngState of Python, numpy and torch{'' if self._cuda else ', without accelerators'}>"

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators, without changing them."""
        version, words, gauss = random.getstate()
        return {
            "python": {"version": version, "words": np.array(words, _WORDS).tobytes(), "gauss": gauss},
            "numpy": _pack_arrays(np.random.get_state(legacy=False)),
            "torch": _pack(torch.get_rng_state()),
            "accelerator": _read_accelerator() if self._cuda else None,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Restore all generators; raises Mismatch, and changes none, if one of them cannot be restored."""
        try:
            python, numpy, cpu = _unpack_python(state_dict["python"]), state_dict["numpy"], state_dict["torch"]
            accelerator = state_dict["accelerator"] if self._cuda else None
            _try_out(python, numpy, cpu)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise Mismatch(
                f"this is not a state of random generators that this Python, numpy and torch can restore: {error};"
                " load the rest without it, and set new seeds"
            ) from error
        if accelerator is not None:
            _write_accelerator(accelerator)
        random.setstate(python)
        np.random.set_state(_unpack_arrays(numpy))
        torch.set_rng_state(_unpack(cpu))


def _pack(state: torch.Tensor) -> bytes:
    return bytes(state.numpy().tobytes())


def _unpack(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpack_python(state: Mapping[str, Any]) -> tuple[Any, ...]:
    words = np.frombuffer(state["words"], _WORDS).tolist()
    return state["version"], tuple(words), state["gauss"]


def _pack_arrays(value: Any) -> Any:
    """Turn the arrays in the state of a numpy generator into plain values, whatever fields it has."""
    if isinstance(value, dict):
        return {key: _pack_arrays(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "data": value.tobytes()}
    return value.item() if isinstance(value, np.generic) else value


def _unpack_arrays(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "data"}:
        return np.frombuffer(value["data"], np.dtype(value["dtype"])).copy()
    return {key: _unpack_arrays(item) for key, item in value.items()}


def _try_out(python: tuple[Any, ...], numpy: Any, cpu: bytes) -> None:
    """Validate the states on throwaway generators first, so that a bad state changes nothing."""
    random.Random().setstate(python)
    current = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs do not list it
    np.random.RandomState(type(current)()).set_state(_unpack_arrays(numpy))
    torch.Generator().set_state(_unpack(cpu))


def _find_accelerator() -> tuple[str, int, Any]:
    """Return the kind and number of accelerators and torch's module for them; `("", 0, None)` if there are none."""
    device = find_accelerator()
    count = torch.accelerator.device_count() if device else 0
    if not device or not count:
        return "", 0, None
    return device.type, count, torch.get_device_module(device)


def _read_accelerator() -> dict[str, Any] | None:
    kind, count, module = _find_accelerator()
    if not count:
        return None
    return {"kind": kind, "states": [_pack(module.get_rng_state(*_choose(kind, index))) for index in range(count)]}


def _choose(kind: str, index: int) -> list[int]:
    """Return the arguments that select a device; the functions for Apple's single device take none."""
    return [] if kind == "mps" else [index]


def _write_accelerator(state: Mapping[str, Any]) -> None:
    kind, count, module = _find_accelerator()
    saved = state["states"]
    if kind != state["kind"] or count < len(saved):
        raise Mismatch(
            f"the random state is for {len(saved)} {state['kind']} device(s), and here are"
            f" {count} {kind or 'accelerators'}; RngState(cuda=False) leaves accelerators alone"
        )
    sizes = [module.get_rng_state(*_choose(kind, index)).numel() for index in range(len(saved))]
    if sizes != [len(data) for data in saved]:
        raise Mismatch(
            f"the random state of {kind} has another form in this torch; RngState(cuda=False) leaves accelerators alone"
        )
    for index, data in enumerate(saved):
        module.set_rng_state(_unpack(data), *_choose(kind, index))


class ResumableSampler:
    """A batch sampler that resumes where the training loop was, for `DataLoader(data, batch_sampler=sampler)`.

    Call `advance()` once per batch, after the batch was used: these calls are its position. Batches that a loader has
    prefetched do not count, so a resumed run gets the very next batch.

    The order of an epoch depends on seed and epoch alone, and is the same with every version of torch and numpy; no
    global generator is used. With several ranks, each takes every `world_size`-th sample of that order. All ranks have
    the same state, so any rank's state can be loaded, also with another number of ranks.
    """

    def __init__(
        self,
        length: int,
        *,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Cut the numbers up to `length` into batches.

        Args:
            length: the number of samples in the data.
            batch_size: samples in a batch of one rank.
            shuffle: use another order in each epoch.
            seed: selects the orders of all epochs.
            drop_last: leave out samples that do not fill a batch on every rank; otherwise the last batch may be
                smaller, and a few samples are repeated so that all ranks get equally many.
            rank: the number of this rank.
            world_size: the number of ranks.
        """
        if batch_size < 1 or world_size < 1 or not 0 <= rank < world_size or not 0 <= seed < _MAX_SEED:
            raise ValueError(
                "batch_size and world_size must be at least 1, rank below world_size, seed a number of 64 bits;"
                f" not {batch_size=}, {world_size=}, {rank=}, {seed=}"
            )
        self._length = length
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._rank = rank
        self._world_size = world_size
        per_batch = batch_size * world_size
        self._num_batches = length // per_batch if drop_last else -(-length // per_batch)
        if self._num_batches < 1:
            raise ValueError(f"{length} samples give no batch of {batch_size} on {world_size} rank(s)")
        self._epoch = 0
        self._position = 0
        self._exhausted_at: tuple[int, int] | None = None

    def __repr__(self) -> str:
        """Show the size of the data and the position in it."""
        where = f"epoch {self._epoch}, batch {self._position} of {self._num_batches}"
        return f"<ResumableSampler of {self._length} samples in batches of {self._batch_size}: {where}>"

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one if the last is complete."""
        return self._epoch

    @property
    def position(self) -> int:
        """The number of batches of the epoch that are done."""
        return self._position

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, for this and every rank."""
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the remaining batches of this epoch; only `advance` marks a batch as done."""
        here = (self._epoch, self._position)
        if here == self._exhausted_at:
            raise HoldfastError(
                f"all batches of epoch {self._epoch} were yielded and none was marked as done; call"
                " sampler.advance() after each step, or sampler.set_epoch() to get them again"
            )
        return self._iter_batches(*here)

    def _iter_batches(self, epoch: int, position: int) -> Iterator[list[int]]:
        share = self._plan_share(epoch)
        for start in range(position * self._batch_size, self._num_batches * self._batch_size, self._batch_size):
            yield share[start : start + self._batch_size].tolist()
        self._exhausted_at = (epoch, position)

    def _plan_share(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return this rank's samples in the order of an epoch."""
        order = np.arange(self._length, dtype=np.int64)
        if self._shuffle:
            # RandomState, because only its numbers are guaranteed never to change; those of numpy's and torch's
            # Generator are not.
            halves = [half for number in (self._seed, epoch) for half in (number & 0xFFFFFFFF, number >> 32)]
            np.random.RandomState(halves).shuffle(order)
        if self._drop_last:
            total = self._num_batches * self._batch_size * self._world_size
        else:
            total = -(-self._length // self._world_size) * self._world_size
        mine = np.arange(self._rank, total, self._world_size) % self._length
        return order[mine]

    def advance(self) -> None:
        """Mark one more batch as done; after the last one, the next epoch begins."""
        self._position += 1
        if self._position == self._num_batches:
            self._epoch, self._position = self._epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; does nothing for the current one."""
        if epoch < 0:
            raise ValueError(f"epochs count from 0, not {epoch}")
        if epoch != self._epoch:
            self._epoch, self._position = epoch, 0
        self._exhausted_at = None

    def state_dict(self) -> dict[str, Any]:
        """Return the data position, and what the order depends on."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "batch_size": self._batch_size,
            "world_size": self._world_size,
            **self._describe_order(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Restore a data position; raises Mismatch, and changes nothing, if the following batches would differ."""
        try:
            epoch, position = int(state_dict["epoch"]), int(state_dict["position"])
            seen = position * int(state_dict["batch_size"]) * int(state_dict["world_size"])
            problems = [
                f"{key} is {here!r}, the state has {state_dict[key]!r}"
                for key, here in self._describe_order().items()
                if state_dict[key] != here
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise Mismatch(f"this is not the state of a ResumableSampler: {error!r}") from error
        per_batch = self._batch_size * self._world_size
        if epoch < 0 or position < 0:
            problems.append(f"epoch {epoch}, batch {position} is not a position in the data")
        if seen % per_batch:
            problems.append(f"{seen} samples were seen, which is not a multiple of {per_batch}, a batch on all ranks")
        if problems:
            raise Mismatch(
                f"the sampler cannot continue in the saved order: {'; '.join(problems)}."
                " Create it with the saved arguments, or leave its state out and call set_epoch",
                problems=tuple(problems),
            )
        position = seen // per_batch
        # With a larger batch size, less than one batch of the epoch may be left.
        self._epoch, self._position = (epoch + 1, 0) if position >= self._num_batches else (epoch, position)
        self._exhausted_at = None

    def _describe_order(self) -> dict[str, Any]:
        return {"length": self._length, "shuffle": self._shuffle, "seed": self._seed, "drop_last": self._drop_last}
