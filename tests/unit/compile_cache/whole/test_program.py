"""A program is plain data, and anything else is refused as damaged."""

from __future__ import annotations

import pytest

from holdfast.compile_cache.whole.program import (
    Autograd,
    GeneratedCode,
    Program,
    Tangent,
    decode_program,
    encode_program,
)
from holdfast.errors import Corrupt

_CODE = GeneratedCode("call = None", {"cpp_add": "ab"}, ("mm",), ("torch.ops.aten",))
_AUTOGRAD = Autograd(2, (1,), (), (0,), (Tangent(0, (2, 3), (3, 1)),), deterministic=False, donated=False)


@pytest.mark.parametrize("autograd", [None, _AUTOGRAD])
def test_a_program_can_be_encoded_and_decoded(autograd: Autograd | None) -> None:
    backward = _CODE if autograd else None
    program = Program((0, 2), 1, {"list": [{"output": 0}, None, 3]}, (), False, False, _CODE, backward, autograd)

    assert decode_program(encode_program(program), "x") == program


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"program": 2}', b'{"program": 1, "inputs": 3}'])
def test_other_data_are_damaged(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_program(data, "x")
