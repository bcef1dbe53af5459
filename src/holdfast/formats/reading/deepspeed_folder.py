"""Reads ZeRO checkpoints of DeepSpeed, stages 1 to 3: the fp32 weights, assembled from the partitions of all ranks.

The files contain objects of DeepSpeed beside the tensors. None of them is made: only tensors, shapes and numbers count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from holdfast.errors import BadFile, Untrusted
from holdfast.formats.reading.byte_ranges import ByteReader, SlicedBytes, join_bytes, open_file_in
from holdfast.formats.reading.found import FoundCheckpoint, Placeholders, TensorForm, make_tensor
from holdfast.formats.reading.pickle_reader import PickledObject, make_inert
from holdfast.formats.reading.torch_file import read_torch_object
from holdfast.formats.receipt import LeftOut
from holdfast.repo.files import SourceFolder
from holdfast.tensors.spec import contiguous_stride, item_bytes

_LATEST: Final = "latest"
_OPTIM: Final = "_optim_states.pt"
_MODEL: Final = "_model_states.pt"
_MAX_TAG: Final = 1000
_DIGITS: Final = re.compile(r"(\d+)")


def is_zero_folder(folder: SourceFolder) -> bool:
    """Return whether a folder, or the newest checkpoint in it, has the partitioned optimizer states of ZeRO."""
    return any(name.endswith(_OPTIM) for name in _list_names(_find_newest(folder)))


def read_zero_folder(folder: SourceFolder) -> FoundCheckpoint:
    """Open a ZeRO checkpoint: parameters in fp32, buffers as they were saved, tied parameters tied."""
    return _ZeroFolder(_find_newest(folder)).read()


def _list_names(folder: SourceFolder) -> list[str]:
    try:
        return folder.list_names()
    except OSError:
        return []


def _find_newest(folder: SourceFolder) -> SourceFolder:
    """Return the folder that the file `latest` names, if there is one; otherwise the folder itself."""
    if not folder.has(_LATEST):
        return folder
    data = open_file_in(folder, _LATEST)
    tag = bytes(data.read(0, min(data.size_bytes, _MAX_TAG))).decode(errors="replace").strip()
    is_name = bool(tag) and tag not in (".", "..") and "/" not in tag and "\0" not in tag
    return folder.enter(tag) if is_name else folder


class _ZeroFolder:
    """One ZeRO checkpoint."""

    def __init__(self, folder: SourceFolder) -> None:
        self._folder = folder
        self._placeholders = Placeholders()
        names = sorted(_list_names(folder), key=_natural)
        self._optim = [self._read_object(name) for name in names if name.endswith(_OPTIM)]
        self._model = [self._read_object(name) for name in names if name.endswith(_MODEL)]
        if not self._optim or not self._model:
            raise BadFile(
                f"{folder.path} has no files *{_MODEL} and *{_OPTIM}: it is no ZeRO checkpoint", path=folder.path
            )

    def read(self) -> FoundCheckpoint:
        """Return the weights by name."""
        states = [self._find(state, "optimizer_state_dict") for state in self._optim]
        stage, count = _unwrap(self._find(states[0], "zero_stage")), self._find(states[0], "partition_count")
        count = max(count) if isinstance(count, list) and count else count
        if type(stage) is not int or stage not in (1, 2, 3) or count != len(states):
            raise BadFile(
                f"{self._folder.path} is incomplete: ZeRO stage {str(stage)[:20]} of {str(count)[:20]} ranks, and"
                f" there are {len(states)} files *{_OPTIM}; copy the whole folder",
                path=self._folder.path,
            )
        groups = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        flat = [self._list_readers(self._find(state, groups)) for state in states]
        weights = self._read_buffers()
        weights.update(self._read_frozen(stage))
        weights.update(self._read_stage_3(flat) if stage == 3 else self._read_stage_1_2(flat, states[0]))
        for name, same in self._pairs(self._model[0].get("shared_params")):
            if same in weights:
                weights[name] = weights[same]
        reason = "only the fp32 weights and the buffers of a ZeRO checkpoint are imported"
        left_out = (LeftOut("the optimizer state", reason), LeftOut("the training state", reason))
        return FoundCheckpoint("deepspeed", weights, self._placeholders, left_out=left_out)

    def _read_object(self, name: str) -> dict[Any, Any]:
        path = self._folder.join(name)
        found = read_torch_object(
            open_file_in(self._folder, name), self._placeholders, where=path, find_other=_make_inert_object
        )
        if not isinstance(found, dict):
            raise BadFile(f"{path} is no file of a ZeRO checkpoint", path=path)
        return found

    def _find(self, state: Any, key: str) -> Any:
        if not isinstance(state, Mapping) or key not in state:
            raise BadFile(
                f"{self._folder.path} is no ZeRO checkpoint that can be read: it has no {key!r}", path=self._folder.path
            )
        return state[key]

    def _pairs(self, found: Any) -> list[tuple[str, str]]:
        items = found.items() if isinstance(found, Mapping) else found if isinstance(found, list) else ()
        return [(str(a), str(b)) for a, b in items]

    def _list_readers(self, tensors: Any) -> list[ByteReader]:
        """Return the bytes of the flat fp32 tensors of one rank, one for each group."""
        if not isinstance(tensors, list | tuple):
            raise BadFile(f"{self._folder.path} has no flat fp32 weights", path=self._folder.path)
        return [self._find_reader(tensor) for tensor in tensors]

    def _find_reader(self, tensor: Any) -> ByteReader:
        stored = self._placeholders.find(tensor) if isinstance(tensor, torch.Tensor) else None
        if stored is None or not tensor.is_contiguous():
            raise BadFile(f"{self._folder.path} has a weight that is no plain tensor", path=self._folder.path)
        size = item_bytes(tensor.dtype)
        return SlicedBytes(stored.reader, int(tensor.storage_offset()) * size, tensor.numel() * size)

    def _iter_shapes(self, key: str = "param_shapes") -> list[list[tuple[str, tuple[int, ...]]]]:
        groups = self._find(self._model[0], key)
        groups = [groups] if isinstance(groups, Mapping) else groups
        return [[(str(name), tuple(shape)) for name, shape in group.items()] for group in groups]

    def _read_buffers(self) -> dict[str, torch.Tensor]:
        module, names = self._find(self._model[0], "module"), self._find(self._model[0], "buffer_names")
        return {name: tensor for name, tensor in module.items() if name in set(names)}

    def _read_frozen(self, stage: int) -> dict[str, torch.Tensor]:
        if not self._model[0].get("frozen_param_shapes"):
            return {}
        states = self._model if stage == 3 else self._model[:1]
        fragments = [self._find(state, "frozen_param_fragments") for state in states]
        frozen = {}
        for name, shape in self._iter_shapes("frozen_param_shapes")[0]:
            tensors = [self._find(found, name) for found in fragments]
            parts = [self._find_reader(tensor) for tensor in tensors]
            frozen[name] = self._make(name, shape, join_bytes(parts), tensors[0].dtype)
        return frozen

    def _read_stage_1_2(self, flat: Sequence[Sequence[ByteReader]], state: Any) -> dict[str, torch.Tensor]:
        """Return the weights of stages 1 and 2: each group is one vector, cut into a part for each rank."""
        paddings = state.get("param_alignment_paddings")
        weights: dict[str, torch.Tensor] = {}
        for number, shapes in enumerate(self._iter_shapes()):
            whole = join_bytes([self._pick(rank, number) for rank in flat])
            at = 0
            for position, (name, shape) in enumerate(shapes):
                size = 4 * math.prod(shape)
                weights[name] = self._make(name, shape, self._slice(name, whole, at, size))
                at += size + (4 * paddings[number][position] if paddings else 0)
        return weights

    def _read_stage_3(self, flat: Sequence[Sequence[ByteReader]]) -> dict[str, torch.Tensor]:
        """Return the weights of stage 3: each weight is cut into a part for each rank, at the same place on all."""
        ranks = [join_bytes(groups) for groups in flat]
        weights: dict[str, torch.Tensor] = {}
        at = 0
        for name, shape in (each for group in self._iter_shapes() for each in group):
            size = 4 * -(-math.prod(shape) // len(ranks))
            parts = [self._slice(name, rank, at, size) for rank in ranks]
            weights[name] = self._make(name, shape, join_bytes(parts))
            at += size
        return weights

    def _pick(self, groups: Sequence[ByteReader], number: int) -> ByteReader:
        if number >= len(groups):
            raise BadFile(
                f"{self._folder.path}: a rank has only {len(groups)} groups of weights", path=self._folder.path
            )
        return groups[number]

    def _slice(self, name: str, reader: ByteReader, at: int, size: int) -> ByteReader:
        if at + size > reader.size_bytes:
            raise BadFile(f"{self._folder.path} is incomplete: {name!r} ends after the last byte of its group")
        return SlicedBytes(reader, at, size)

    def _make(
        self, name: str, shape: tuple[int, ...], reader: ByteReader, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        stored = self._placeholders.add_storage(reader)
        form = TensorForm(dtype, shape, contiguous_stride(shape))
        return make_tensor(stored, form, what=f"{self._folder.path}: {name}")


def _make_inert_object(module: str, name: str) -> object:
    """Return a stand-in for a class of DeepSpeed: loss scalers, optimizers, configurations."""
    if not module.startswith(("deepspeed.", "torch.", "numpy.")) and module not in (
        "torch",
        "numpy",
        "types",
        "argparse",
    ):
        raise Untrusted(
            f"the checkpoint contains {module}.{name}, which is no part of DeepSpeed; nothing was imported",
            name=f"{module}.{name}",
        )
    return make_inert(f"{module}.{name}")


def _unwrap(value: Any) -> Any:
    """Return the number of an enum that was not made."""
    return value.args[0] if isinstance(value, PickledObject) and len(value.args) == 1 else value


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name)]
