"""A tour of the store on files: save, share, die in the middle, rot, be told, heal. Needs nothing but Holdfast."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

HOLDFAST: Final = str(Path(sys.executable).with_name("holdfast"))
MEBIBYTE: Final = 1 << 20


def say(text: str) -> None:
    """Print a headline."""
    print(f"\n# {text}", flush=True)


def run(*words: str, expect: int = 0) -> None:
    """Show a command, run it, and insist on its exit code."""
    print("$ holdfast " + " ".join(words), flush=True)
    code = subprocess.run([HOLDFAST, *words], check=False).returncode
    if code != expect:
        raise SystemExit(f"the demo expected exit code {expect}, not {code}")


def make_checkpoint(folder: Path, rng: random.Random) -> None:
    """Write something like a small checkpoint: frozen base, trained head, tokenizer."""
    folder.mkdir()
    (folder / "base.bin").write_bytes(rng.randbytes(24 * MEBIBYTE))
    (folder / "head.bin").write_bytes(rng.randbytes(2 * MEBIBYTE))
    (folder / "tokenizer.json").write_text('{"model": "bpe", "vocab": 50257}\n')


def kill_while_saving(folder: Path) -> None:
    """Start an overwriting save and kill it as soon as its lease shows that it is at work."""
    print("$ holdfast put run/step-2 model --overwrite   # and kill -9", flush=True)
    child = subprocess.Popen([HOLDFAST, "put", "run/step-2", "model", "--overwrite"], stdout=subprocess.DEVNULL)
    while child.poll() is None and not any((folder / "store/leases").iterdir()):
        pass
    child.send_signal(signal.SIGKILL)
    print(f"  exit code {child.wait()}", flush=True)


def flip_a_bit(folder: Path) -> None:
    """Damage the largest pack as a failing disk would."""
    pack = max((folder / "store/packs").iterdir(), key=lambda path: path.stat().st_size)
    with pack.open("r+b") as file:
        file.seek(pack.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    print(f"  one bit of store/packs/{pack.name}", flush=True)


def main() -> None:
    """Run the tour in a temporary directory."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as name:
        folder = Path(name)
        os.chdir(folder)
        os.environ["HOLDFAST_STORE"] = "store"
        make_checkpoint(folder / "model", rng)
        say("A store is a directory. Save a checkpoint: 26 MiB, all new.")
        run("init", "store")
        run("put", "run/step-1", "model", "--meta", "loss=3.2")
        say("Train the head only and save again: the frozen base is not stored twice.")
        (folder / "model/head.bin").write_bytes(rng.randbytes(2 * MEBIBYTE))
        run("put", "run/step-2", "model", "--meta", "loss=2.7")
        run("ls")
        say("Kill a save in the middle: the old state stays, whole.")
        (folder / "model/base.bin").write_bytes(rng.randbytes(24 * MEBIBYTE))
        kill_while_saving(folder)
        run("check", "--read")
        say("Let a bit rot: it is found and named, and never returned.")
        flip_a_bit(folder)
        run("check", "--read", expect=1)
        run("get", "run/step-1", "restored", expect=2)
        say("Save the base again under any name: the rotten chunk is not trusted, and older snapshots heal.")
        rng = random.Random(0)
        (folder / "base.bin").write_bytes(rng.randbytes(24 * MEBIBYTE))
        run("put", "heal", "base.bin")
        run("get", "run/step-1", "restored")
        run("doctor")


if __name__ == "__main__":
    main()
