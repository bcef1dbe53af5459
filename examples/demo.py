"""Kill a training run in the middle, resume it, and prove that it equals one that was not interrupted.

    python examples/demo.py [--keep DIR] [--steps 40] [--layers 4]

Then a run on two ranks is resumed on one and on three. The training scripts themselves, which you may want to
copy, are `train.py` and `train_ranks.py`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import holdfast

TRAIN: Final = Path(__file__).with_name("train.py")
TRAIN_RANKS: Final = Path(__file__).with_name("train_ranks.py")
SHOWN_EVERY: Final = 5
NUM_STEPS_OF_RANKS: Final = 10
ROUNDING: Final = 1e-12
"""The relative difference that losses may have if only the order of additions differs."""


def print_headline(text: str) -> None:
    """Print a headline."""
    print(f"\n# {text}", flush=True)


def expect(claim: str, *, holds: bool) -> None:
    """Print a claim, and end the demo with exit code 1 if it does not hold."""
    print(f"  {'yes' if holds else 'NO'}: {claim}", flush=True)
    if not holds:
        raise SystemExit(f"the demo failed: it does not hold that {claim}")


@contextmanager
def training(store: holdfast.Store, run: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start `train.py` in a separate process, which ends with the block at the latest."""
    with started([sys.executable, str(TRAIN), store.url, "--run", run, *arguments]) as child:
        yield child


@contextmanager
def training_on_ranks(
    store: holdfast.Store, run: str, num_ranks: int, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    """Start `train_ranks.py` with torchrun, in float64."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    with started([*torchrun, str(TRAIN_RANKS), "--store", store.url, "--prefix", run, "--double", *arguments]) as child:
        yield child


@contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command; its process, and the ranks that torchrun has started, end with the block at the latest."""
    # Without it torchrun prints a long warning that it has chosen the number itself.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield child
    finally:
        # Not SIGKILL: torchrun could not pass that on to its ranks.
        child.terminate()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def iter_lines(child: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the lines that a training run prints, and print some of them to show progress."""
    assert child.stdout is not None
    for line in child.stdout:
        text = line.strip()
        if find_step(text) % SHOWN_EVERY == 0:
            print(f"  {text}", flush=True)
        yield text


def find_step(text: str) -> int:
    """Return the number of the step that a line reports; 0 for any other line."""
    return int(text.split()[1]) if text.startswith("step ") else 0


def kill_in_the_middle(child: subprocess.Popen[str], *, kill_at: int) -> None:
    """Let a training run reach a step, then kill it as the kernel does when memory is short."""
    for line in iter_lines(child):
        if find_step(line) >= kill_at:
            break
    child.kill()
    expect(f"it was killed after step {kill_at}, by signal 9", holds=child.wait() == -9)


def run_to_end(child: subprocess.Popen[str]) -> list[str]:
    """Wait until a training run ends and return the lines that it printed."""
    lines = list(iter_lines(child))
    expect("it ended with exit code 0", holds=child.wait() == 0)
    return lines


def prove_equal(store: holdfast.Store, name: str, reference: str) -> None:
    """Compare a run with one that was not interrupted: every loss as a float, everything else by digest."""
    losses = store.load(name, only="progress")["progress"]["losses"]
    expected = store.load(reference, only="progress")["progress"]["losses"]
    expect(f"all {len(expected)} losses are equal, to the last bit", holds=losses == expected)
    found, wanted = store.snapshot(name).digest, store.snapshot(reference).digest
    expect(
        f"model, AdamW, schedule, sampler and random generators are equal: {found.hex()[:16]}... is the digest of both",
        holds=found == wanted,
    )


def prove_sound(store: holdfast.Store, claim: str, *, read: bool) -> None:
    """Check the store, with `read` every byte. Files that a killed save left behind are harmless."""
    findings = store.check(read=read)
    harm = [finding.message for finding in findings if finding.severity != "note"]
    expect("; ".join([claim, *harm]), holds=not harm)
    if findings:
        print(f"  (Left over from the save that was killed: {len(findings)} files, which `holdfast gc` removes.)")


def prove_same_tensors(store: holdfast.Store, name: str, reference: str) -> None:
    """Compare the tensors of model and optimizer, bit by bit, regardless of which ranks have saved them."""
    found, wanted = (find_tensors(store.load(each, only=["model", "optimizer"])) for each in (name, reference))
    expect(
        f"{name}, which was loaded and saved again, is the same: all {len(wanted)} tensors, bit by bit",
        holds=bool(wanted) and found == wanted,
    )


def find_tensors(tree: Any, path: str = "") -> dict[str, Any]:
    """Return dtype, shape and bytes of the tensors in nested dicts and lists, by path."""
    if hasattr(tree, "numpy"):
        array = tree.numpy()
        return {path: (array.dtype, array.shape, array.tobytes())}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return {name: each for key, item in items for name, each in find_tensors(item, f"{path}.{key}").items()}


def prove_same_losses(found: list[str], reference: list[str], *, num_ranks: int) -> None:
    """Compare the losses that a resumed run printed with those of the run that it continues."""
    losses, expected = find_losses(found), find_losses(reference)
    difference = max(abs(loss - expected[step]) / expected[step] for step, loss in losses.items())
    expect(
        f"on {num_ranks} rank{'s' if num_ranks > 1 else ''}, the losses of steps {min(losses)} to {max(losses)} are"
        f" those of 2 ranks, but for rounding: they differ by at most {difference:.0e}",
        holds=max(losses) == max(expected) and difference <= ROUNDING,
    )


def find_losses(lines: list[str]) -> dict[int, float]:
    """Return the loss of each step that a training run has printed."""
    return {find_step(line): float(line.split()[3]) for line in lines if find_step(line)}


def count_new_bytes(snapshots: Sequence[holdfast.Snapshot]) -> list[int]:
    """Return the bytes that each snapshot added: a chunk is stored once, and counts for the first that contains it."""
    stored: set[bytes] = set()
    added = []
    for snapshot in snapshots:
        chunks = [chunk for entry in snapshot.open().reader.manifest.iter_entries() for chunk in entry.chunks]
        sizes = {bytes(chunk.digest): chunk.size_bytes for chunk in chunks}
        added.append(sum(size for digest, size in sizes.items() if digest not in stored))
        stored |= sizes.keys()
    return added


def show_table(store: holdfast.Store, root: Path) -> None:
    """Print the size of each snapshot and its new bytes, in the order of the saves."""
    snapshots = sorted(store.snapshots(), key=lambda snapshot: snapshot.time)
    added = count_new_bytes(snapshots)
    print(f"  {'SNAPSHOT':<20} {'LOGICAL':>10} {'NEW':>10} {'SHARED':>7}")
    for snapshot, new in zip(snapshots, added, strict=True):
        shared = 1 - new / snapshot.logical_bytes
        print(f"  {snapshot.name:<20} {mebibytes(snapshot.logical_bytes)} {mebibytes(new)} {shared:>7.0%}")
    logical = sum(snapshot.logical_bytes for snapshot in snapshots)
    on_disk = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    print(f"  {'in all':<20} {mebibytes(logical)} {mebibytes(sum(added))} {1 - sum(added) / logical:>7.0%}")
    print(f"  {'on disk':<20} {'':>10} {mebibytes(on_disk)}")


def mebibytes(size_bytes: int) -> str:
    """Format a size for the table."""
    return f"{size_bytes / (1 << 20):>6.1f} MiB"


def run_demo(root: Path, *, num_steps: int, num_layers: int) -> None:
    """Train, kill, resume, compare, fine-tune, list the store; then train and resume on many ranks."""
    save_every = max(num_steps // 4, 1)
    last = f"step-{num_steps}"
    sizes = ("--steps", str(num_steps), "--layers", str(num_layers))
    often = ("--save-every", str(save_every))
    seldom = ("--save-every", str(num_steps))
    with holdfast.open(root) as store:
        print_headline(
            f"Train a {num_layers}-layer transformer in a separate process; checkpoint interval: {save_every}."
        )
        print(
            "  (At the same time, the same training runs without interruption. Importing torch takes a while.)",
            flush=True,
        )
        with training(store, "undisturbed/", *sizes, *seldom) as undisturbed:
            with training(store, "run/", *sizes, *often) as child:
                # The second save waited for the first one, so at least that one is committed by now.
                kill_in_the_middle(child, kill_at=2 * save_every + 1 + save_every // 3)
            prove_sound(store, "there is no half-written checkpoint", read=False)

            print_headline("Start it again with the same command. It finds its newest checkpoint by itself.")
            with training(store, "run/", *sizes, *often) as child:
                lines = run_to_end(child)
            expect(f"it {lines[0]}", holds=lines[0].startswith("resumed from run/step-"))

            print_headline("Compare with the training that was not interrupted.")
            undisturbed.communicate()
            expect("that one ended with exit code 0", holds=undisturbed.returncode == 0)
        prove_equal(store, f"run/{last}", f"undisturbed/{last}")

        num_frozen = max(num_layers - 1, 1)
        print_headline(f"Fine-tune the result with {num_frozen} of {num_layers} layers frozen.")
        tuning = ("--start-from", f"run/{last}", "--freeze", str(num_frozen), "--layers", str(num_layers))
        with training(store, "finetune/", *tuning, "--steps", str(2 * save_every), *often) as child:
            run_to_end(child)

        print_headline("The stored snapshots, in the order of the saves:")
        show_table(store, root)
        print(
            "\n  AdamW changes every weight and both of its moments at each step, so the checkpoints of one dense run"
            "\n  share almost nothing. Frozen layers are shared, and so is everything that is saved again: of the two"
            "\n  trainings with the same result, the one that ended later stored nothing."
        )
        train_on_ranks(store)
        print_headline("Read every byte back and compare it with its digest.")
        prove_sound(store, "nothing is damaged or missing", read=True)


def train_on_ranks(store: holdfast.Store) -> None:
    """Train on two ranks, resume from the middle on one and on three, and compare."""
    middle, last = NUM_STEPS_OF_RANKS // 2, NUM_STEPS_OF_RANKS
    sizes = ("--steps", str(last), "--save-every", str(middle))
    print_headline(
        f"Train on 2 ranks with FSDP2, so that each has half of every tensor; checkpoint interval: {middle}."
    )
    with training_on_ranks(store, "two/", 2, *sizes) as child:
        expected = run_to_end(child)

    print_headline(f"Resume from two/step-{middle} on 1 rank, and on 3 ranks.")
    arguments = (*sizes, "--start-from", f"two/step-{middle}")
    with (
        training_on_ranks(store, "one/", 1, *arguments) as one,
        training_on_ranks(store, "three/", 3, *arguments) as three,
    ):
        lines = {num_ranks: run_to_end(child) for num_ranks, child in ((1, one), (3, three))}
    for num_ranks, name in ((1, "one"), (3, "three")):
        prove_same_tensors(store, f"{name}/step-{middle}", f"two/step-{middle}")
        prove_same_losses(lines[num_ranks], expected, num_ranks=num_ranks)
    print(
        "  (With another number of ranks, gradients are added in another order, which changes the last bits of sums."
        "\n  The ranks train in float64, where rounding errors are much smaller than the effect of a wrong weight.)"
    )


def show_commands(root: Path, *, name: str, kept: bool) -> None:
    """Print commands that inspect the store."""
    if not kept:
        print_headline("The store was temporary. To keep it and inspect it: examples/demo.py --keep DIR")
        return
    print_headline("Inspect the store:")
    command = "holdfast" if shutil.which("holdfast") else Path(sys.executable).with_name("holdfast")
    for arguments in ("ls", f"show {name}", "du", "check --read"):
        print(f"  {command} -s {root} {arguments}")
    print_headline("Show it in a browser:")
    print(f"  {command} -s {root} serve")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo in a temporary directory, or in one that is kept."""
    parser = argparse.ArgumentParser(description="Kill a training run, resume it, and prove that nothing differs.")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the store, in a new directory")
    parser.add_argument("--steps", type=int, default=40, help="length of the training; at least 4")
    parser.add_argument("--layers", type=int, default=4, help="layers of the transformer; at least 1")
    options = parser.parse_args(arguments)
    if options.steps < 4 or options.layers < 1:
        parser.error("it takes at least 4 steps and 1 layer")
    if options.keep is not None and options.keep.exists():
        parser.error(f"{options.keep} exists; name a new directory")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        root: Path = options.keep or Path(folder) / "store"
        run_demo(root, num_steps=options.steps, num_layers=options.layers)
        show_commands(root, name=f"run/step-{options.steps}", kept=options.keep is not None)
    print(f"\nEvery claim holds. {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
