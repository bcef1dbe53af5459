"""Train a policy and serve it from two other processes, which take over each version while they serve.

python examples/serve.py STORE run --kills 20    # a trainer and two servers, killed at random and started again
python examples/serve.py STORE train             # or each part by itself
python examples/serve.py STORE serve

The weights of a version follow from its number, so every answer can be checked: it must be the answer of exactly the
version that the server names, to the last bit. `run` checks all answers, and fails if one is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

import torch
from torch import nn

import holdfast

SERIES: Final = "policy"
LAYERS: Final = 6
WIDTH: Final = 512
"""A layer has a chunk of 1 MiB, and its bias a small one."""
PATIENCE_S: Final = 300.0


def make_model() -> nn.Sequential:
    """Return a model with any weights."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def train_to(model: nn.Sequential, version: int) -> None:
    """Give a model the weights of a version: layer i changes in every (i + 1)-th version."""
    with torch.no_grad():
        for number, layer in enumerate(model):
            generator = torch.Generator().manual_seed(1000 * number + version // (number + 1))
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)


def answer(model: nn.Module) -> str:
    """Return the answer of a model to a fixed question, bit for bit."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.linspace(-1, 1, WIDTH))
    return found[:8].numpy().tobytes().hex()


def train(path: str) -> None:
    """Publish version after version; a trainer that was killed goes on after the last one that was committed."""
    model = make_model()
    with holdfast.open(path) as store:
        while True:
            newest = store.latest(f"{SERIES}/")
            version = 1 if newest is None else int(newest.name.rpartition("/")[2]) + 1
            train_to(model, version)
            result = store.publish(SERIES, model, keep=2)
            print(f"published {result.name} {result.new_bytes}", flush=True)


def serve(path: str) -> None:
    """Answer, and take over each new version between two answers."""
    model = make_model()
    loaded: holdfast.Snapshot | None = None
    with holdfast.open(path) as store, store.follow(f"{SERIES}/") as follower:
        while True:
            # The first version has to be waited for; after that, serving goes on if there is no newer one.
            snapshot = next(follower) if loaded is None else follower.poll()
            if snapshot is not None:
                try:
                    store.load_into(snapshot, model, since=loaded)
                    loaded = snapshot
                except holdfast.SnapshotGone:
                    pass  # the trainer was faster: it has deleted this version, and the next one is there
            if loaded is not None:
                print(f"{loaded.name} {answer(model)}", flush=True)


class Part:
    """A trainer or a server, as a process that can be killed and started again."""

    def __init__(self, path: str, verb: str) -> None:
        self._command = [sys.executable, __file__, path, verb]
        self.lines: list[str] = []
        self.start()

    def start(self) -> None:
        """Start the process."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        self._rest = b""

    def kill(self) -> None:
        """Send SIGKILL to the process, and wait for its end."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def read(self) -> None:
        """Read the lines that the process has printed; the last one may not be complete yet."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            raise RuntimeError(f"{self._command[-1]} has ended by itself")
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += [line.decode() for line in lines]


def iter_output(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield a part whenever it has printed something."""
    stop_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < stop_s:
        with selectors.DefaultSelector() as selector:
            for part in parts:
                assert part.process.stdout is not None
                selector.register(part.process.stdout, selectors.EVENT_READ, part)
            for key, _ in selector.select(timeout=1.0):
                yield key.data
    raise TimeoutError(f"not done within {PATIENCE_S:.0f} s")


def run(path: str, *, kills: int, seed: int) -> None:
    """Run a trainer and two servers, kill one at random again and again, and check every answer."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        parts = [Part(path, verb) for verb in ("train", "serve", "serve")]
        for part in parts:
            stack.callback(part.kill)
        pause, seen = 0, 0
        for part in iter_output(parts):
            part.read()
            # By what was printed, and not by a clock: the example does the same on a slow machine.
            printed = sum(len(each.lines) for each in parts)
            if kills and printed - seen >= pause and all(each.lines for each in parts):
                victim = chance.choice(parts)
                victim.kill()
                victim.start()
                kills, seen, pause = kills - 1, printed, chance.randrange(5, 100)
            if not kills and all(len(find_versions(each.lines)) >= 3 for each in parts):
                break
    answers = [line for part in parts[1:] for line in part.lines]
    check_answers(answers)
    versions = len(find_versions(answers))
    print(f"{len(answers)} answers, all of one of {versions} versions; {len(parts[0].lines)} versions were published")


def find_versions(lines: Sequence[str]) -> set[str]:
    """Return the names of the versions in these lines."""
    return {word for line in lines for word in line.split() if word.startswith(f"{SERIES}/")}


def check_answers(lines: Sequence[str]) -> None:
    """Raise if an answer is not that of the version that the server named."""
    model = make_model()
    expected: dict[str, str] = {}
    for line in lines:
        name, found = line.split()
        if name not in expected:
            train_to(model, int(name.rpartition("/")[2]))
            expected[name] = answer(model)
        if found != expected[name]:
            raise AssertionError(f"{name}: the answer is of no version, or of another one: {found}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that was asked for."""
    parser = argparse.ArgumentParser(description="Train a policy, and serve it from other processes.")
    parser.add_argument("store", help="path or URL of the store")
    parser.add_argument("verb", choices=["train", "serve", "run"])
    parser.add_argument("--kills", type=int, default=20, help="how often `run` kills one of the processes")
    parser.add_argument("--seed", type=int, default=0, help="which one `run` kills, and when")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.verb == "run":
        run(options.store, kills=options.kills, seed=options.seed)
    else:
        {"train": train, "serve": serve}[options.verb](options.store)


if __name__ == "__main__":
    main()
