"""Builds folders to import or save in which a file or directory is a symbolic link; see README.md."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.utils._content_store import ContentStoreWriter

SECRET: Final = b"-----BEGIN KEY----- 7f83b1657ff1fc53b92dc18148a1d65d"
"""What the file outside contains; a store that has these bytes has let them in."""
OUTSIDE: Final = ("absolute", "relative", "chain", "swapped back")
"""How a link leads outside: by an absolute path, by `..`, by a second link, or out of the folder and into it again."""


def _shards(folder: Path) -> None:
    for number in (1, 2):
        save_file({f"w{number}": torch.ones(40)}, folder / f"{number}.safetensors")
    files = {f"w{number}": f"{number}.safetensors" for number in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def _pretrained(folder: Path) -> None:
    save_file({"w": torch.ones(40)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "graph.json").write_text("{}")


def _torch_shards(folder: Path) -> None:
    torch.save({"w": torch.ones(40)}, folder / "part-1.bin")
    torch.save({"v": torch.ones(40)}, folder / "pytorch_model.bin")
    files = {"w": "part-1.bin", "v": "pytorch_model.bin"}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))


def _dcp(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is only one process
        save_dcp({"w": torch.ones(600, 600), "n": 3}, checkpoint_id=str(folder), no_dist=True)


def _content(folder: Path) -> None:
    writer: Any = ContentStoreWriter(str(folder), stable_hash=True)
    writer.write_tensor("layer/weight", torch.ones(40))
    writer.write_tensor("other", torch.zeros(40))


def _zero(folder: Path) -> None:
    step = folder / "step2"
    step.mkdir()
    flat = {"zero_stage": 2, "partition_count": 1, "single_partition_of_fp32_groups": [torch.arange(6.0)]}
    torch.save({"optimizer_state_dict": flat}, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    state = {"module": {}, "buffer_names": [], "param_shapes": [{"a": torch.Size([2, 3])}], "shared_params": {}}
    torch.save(state, step / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("step2")


FOLDERS: Final[dict[str, Callable[[Path], None]]] = {
    "safetensors shards": _shards,
    "save_pretrained": _pretrained,
    "torch shards": _torch_shards,
    "dcp": _dcp,
    "content store": _content,
    "zero": _zero,
}
"""By format: fills an empty folder with a sound checkpoint."""


def build(kind: str, folder: Path) -> Path:
    """Create `folder` with a sound checkpoint of a format, and return it."""
    folder.mkdir(parents=True)
    FOLDERS[kind](folder)
    return folder


def iter_places(folder: Path) -> Iterator[Path]:
    """Yield every file and directory below a folder: each can be replaced by a link."""
    yield from sorted(folder.rglob("*"))


def lead_outside(place: Path, way: str) -> None:
    """Move a file or directory out of its folder, and put a link to it in its place."""
    outside = next(parent for parent in place.parents if parent.name == "given").parent / "outside"
    outside.mkdir(exist_ok=True)
    place.rename(outside / "moved")
    up = "/".join([".."] * (len(place.relative_to(outside.parent).parts) - 1))
    if way == "absolute":
        place.symlink_to(outside / "moved")
    elif way == "relative":
        place.symlink_to(f"{up}/outside/moved")
    elif way == "chain":
        (outside / "first").symlink_to("moved")
        place.symlink_to(f"{up}/outside/first")
    else:
        # The name is inside the folder; only the directory on the way to it is a link that leads outside.
        (place.parent / ".way").symlink_to(outside)
        place.symlink_to(".way/moved")


def build_hub_cache(top: Path) -> Path:
    """Create a cache of the Hugging Face hub with one model, and return the folder of its snapshot."""
    model = top / "models--org--name"
    snapshot = model / "snapshots" / "0123abcd"
    for folder in (model / "blobs", snapshot / "sub"):
        folder.mkdir(parents=True)
    save_file({"w": torch.ones(40)}, model / "blobs" / "weights")
    (model / "blobs" / "config").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/weights")
    (snapshot / "config.json").symlink_to("../../blobs/config")
    (snapshot / "sub" / "more.json").symlink_to("../../../blobs/config")
    return snapshot
