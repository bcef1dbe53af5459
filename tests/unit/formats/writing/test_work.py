"""Lines of a receipt for what was copied."""

from __future__ import annotations

import torch

from holdfast.digest import hash_bytes
from holdfast.formats.receipt import CastErrors, TensorDigest
from holdfast.formats.writing.copying import Copied, make_receipt_tensor
from holdfast.formats.writing.plan import PlannedTensor
from holdfast.formats.writing.snapshot_tensor import SnapshotTensor
from holdfast.tensors.spec import TensorSpec

SOURCE = TensorDigest("float32", (2,), hash_bytes(b"before"))
RESULT = TensorDigest("float16", (2,), hash_bytes(b"after"))


def test_a_line_has_both_sides_and_both_names() -> None:
    tensor = SnapshotTensor("model.w", 0, TensorSpec(torch.float32, (2,), (1,)))
    copied = Copied(0, SOURCE, RESULT, CastErrors(1.0, 2.0))

    line = make_receipt_tensor(PlannedTensor(tensor, "w", 0), copied, "w.safetensors")
    tied = make_receipt_tensor(PlannedTensor(tensor, "w", 0), copied, "w.safetensors", "first")

    assert (line.name, line.name_in_files, line.file) == ("model.w", "w", "w.safetensors")
    assert (line.source, line.result, line.cast) == (SOURCE, RESULT, CastErrors(1.0, 2.0))
    assert tied.name_in_files == "first"
