"""Every verb with every option, as commands to run on one store that has something for each of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

import holdfast
from holdfast.repo.format.source import BytesSource
from holdfast.repo.write.writer import Request
from holdfast.repo.write.writer import save as save_files
from tests.kit.compile_artifacts import make_artifact, make_key, store_artifact
from tests.kit.recordings import Recording, write_recorded

KEY: Final = make_key("a").digest[:12]
OTHER_KEY: Final = make_key("b").digest[:12]

READING: Final = [
    "ls",
    "ls --long",
    "ls -l run/ --json",
    "ls run/ --where 'val_loss < 1 or age < 2d' --sort -val_loss --limit 5",
    "ls run/* --columns name,val_loss,size,tag --json",
    "ls --tree",
    "ls --tree --json",
    "log",
    "log best --json",
    "log run/ --where 'val_loss exists' --limit 3",
    "follow run/ --timeout 0s",
    "follow --since run/1 --every --poll 1s --timeout 0s --json",
    "bisect run/ -- sh -c 'test {} != run/2'",
    "bisect run/ --where 'size > 0' --json -- sh -c 'test $HOLDFAST_SNAPSHOT != run/2'",
    "show run/1",
    "show run/1 model --chunks",
    "show run/1 --all",
    "show best --json",
    "diff run/1 run/2",
    "diff run/1 run/2 --only model.* --all --json",
    "cat files config.json",
    "cat files config.json --range 0:1",
    "cat files config.json --json",
    "tag",
    "tag best",
    "tag --json",
    "tag be*",
    "rm run/2",
    "rm run/[2-9]",
    "rm run/2 --json",
    "du",
    "du run/ --json",
    "prune --keep-last 1",
    "prune run/ --keep-best val_loss:1",
    "prune run/ --keep-every 2 --keep-within 7d --json",
    "gc",
    "gc --repack --min-age 1s --wait 0s --json",
    "check",
    "check --read --json",
    "repair",
    "repair --json",
    "cache ls",
    "cache ls --json",
    f"cache show {KEY}",
    f"cache show {KEY} --part graph",
    f"cache show {KEY} --json",
    "cache stat",
    "cache stat --json",
    "cache prune --max-size 1G --max-age 30d",
    "cache prune --max-size 1G --json",
    "cache clear",
    "cache clear --json",
    f"cache why {KEY} {OTHER_KEY}",
    f"cache why {KEY} {OTHER_KEY} --json",
    "serve --no-browser --timeout 0s",
    "serve --no-browser --timeout 0s --host localhost --port 0 --json",
    "doctor",
    "doctor --json",
]
"""Commands that write nothing to the store, and need no torch."""

STORELESS: Final = [
    "completion bash",
    "completion zsh --json",
    "help",
    "help cache ls",
    "help run --json",
]
"""Commands that need neither a store nor torch."""

WITH_TORCH: Final = [
    "doctor --devices",
    "diff run/1 run/2 --values",
    "diff run/1 run/2 --values --json",
    "cache prune --other-systems",
    "cache prune --other-systems --json",
    "run ls",
    "run ls --json",
    "run diff good bad",
    "run diff good bad --noise good-2 --reference good-2 --tolerance exact --map a=a --dim *=replicate --steps 0 --all",
    "run diff good bad --json",
    "run nan bad",
    "run nan bad --steps 0 --json",
    "run ranks good",
    "run ranks good --steps 0 --all --json",
    "run events good",
    "run events good * --step 0 --phase forward --kind output --rank 0 --all --json",
    "run tensor good layers.1 --kind output",
    "run tensor good layers.1 --step 0 --phase forward --kind output --rank 0 --call 0 --path '' --bins 5"
    " --against bad",
    "run tensor good layers.1 --kind output --json",
    "export run/1 exported.safetensors",
    "export run/1 folder --format hf --select model --exclude tiny --dtype float16 --max-shard-size 5GB"
    " --receipt proof.json --json",
    "export run/1 exported.safetensors --force",
    "verify-export exported.safetensors --against run/1",
    "verify-export folder --receipt proof.json --json",
    "run report good bad page.html --noise good-2 --reference good-2 --tolerance table --map a=a --dim *=partial"
    " --steps 0 --rows 10",
    "run report good bad page.html --json",
]
"""Commands that write nothing to the store, and need torch."""

IMPORTING: Final = [
    "import model.safetensors in/1 --receipt r.json",
    "import model.safetensors in/2 --format safetensors --rename a=b --dtype float16 --overwrite",
    "import model.pt in/3 --unpickle --follow-links",
    "import model.safetensors in/5 --meta from=hub --compression small --delta off --json",
    "verify-import model.safetensors --against in/1",
    "verify-import model.pt --against in/3 --unpickle --follow-links",
    "verify-import model.safetensors --receipt r.json --format safetensors --json",
]
"""Commands that save files of other libraries and compare with them; they need torch, and run in this order."""

WRITING: Final = [
    "init fresh",
    "init fresh-2 --json",
    "put again data/config.json --follow-links --meta epoch=3",
    "put again data/config.json --overwrite --meta epoch=4",
    "put third data/config.json --compression fast --delta 5 --json",
    "get files out",
    "get files out3 --json",
    "get run/1 out2 --only model.* --overwrite",
    "tag last run/1",
    "tag last run/2 --move",
    "tag --delete last",
    "tag last run/1 --json",
    "tag --delete last --json",
    "copy run/ files --to other",
    "copy run/1 --to other --overwrite --no-create",
    "copy run/1 --to other --json",
    "mirror elsewhere --yes",
    "mirror --yes --json",
    "mirror elsewhere --forget",
    "doctor --write",
    "doctor --write --json",
    "rm again --yes",
    "rm third --yes --json",
    "prune run/ --keep-last 5 --yes",
    "gc --yes --wait 0s",
    "gc --yes --repack --json",
    "repair --yes",
    "repair --yes --json",
    "repair --from other --yes",
    "cache prune --max-age 30d --yes",
    "cache clear --yes",
]
"""Commands that write, to the store or beside it; they need no torch, and run in this order."""


PLACING: Final = [
    "get files PLACE",
    "export run/1 PLACE",
    "export run/1 PLACE --format hf --select model",
    "export run/1 PLACE --format torch --force",
    "export run/1 PLACE --format dcp",
    "export run/1 out.safetensors --receipt PLACE",
    "export run/1 out --format dcp --receipt PLACE --force",
    "import model.safetensors in/1 --receipt PLACE",
    "run report good bad PLACE",
    "copy run/1 --to PLACE",
    "mirror PLACE --yes",
]
"""Commands that write to a place that the user names, beside the store."""


def make_files(folder: Path) -> None:
    """Write files of other libraries, to be imported."""
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    torch.save({"a": torch.ones(3)}, folder / "model.pt")


def make_store(path: Path) -> None:
    """Make a store that every command finds something in: tensors, files, tags, compiled graphs, recorded runs."""
    store = holdfast.open(path)
    model = {"w": torch.arange(3000.0), "tiny": torch.ones(3)}
    store.save("run/1", {"model": model, "lr": 0.1})
    store.save("run/2", {"model": model | {"w": torch.arange(3000.0) + 1}, "lr": 0.2}, metadata={"val_loss": 0.5})
    store.tag("best", "run/1")
    repo = store.repository
    save_files(repo, Request("files", [BytesSource("config.json", b"{}"), BytesSource("sub/big.bin", bytes(3000))]))
    for recording in (Recording("good"), Recording("good-2"), Recording("bad", is_bad=True, hole=math.nan)):
        write_recorded(repo, recording)
    for seed in "ab":
        store_artifact(repo, make_artifact(seed))
