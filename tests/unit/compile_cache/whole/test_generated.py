"""Generated code is reduced to what a call runs, and refused if it contains anything unknown."""

from __future__ import annotations

import pytest

from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.compile_cache.whole.generated import reduce_code

_CODE = """
import torch
import tempfile
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
unused = torch.ops.inductor
async_compile = AsyncCompile()
cpp_add = async_compile.cpp_pybinding(['float*', 'const float*'], r'''extern "C" void kernel() {}''')
async_compile.wait(globals())
del async_compile
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions
    def call(self, args):
        a, = args
        args.clear()
        cpp_add(a, a)
        extern_kernels.mm(a, a, out=a)
        b = aten.sort.default(a)
        return (b, )
runner = Runner(partitions=[])
call = runner.call
def get_args():
    from torch._dynamo.testing import rand_strided
if __name__ == "__main__":
    pass
"""


def test_only_what_a_call_needs_is_kept() -> None:
    found = reduce_code(_CODE)

    assert "_inductor" not in found.source
    assert "tempfile" not in found.source
    assert "unused" not in found.source
    assert [(each.name, each.types) for each in found.bindings] == [("cpp_add", ("float*", "const float*"))]
    assert found.externs == ("mm",)
    assert found.operators == ("torch.ops.aten", "torch.ops.aten.sort", "torch.ops.aten.sort.default")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("runner = Runner", "import subprocess\nrunner = Runner"),
        ("cpp_add(a, a)", "align(a)"),
        ("cpp_add = async_compile.cpp_pybinding(", "cpp_add = async_compile.triton("),
        ("runner = Runner", "torch.manual_seed(0)\nrunner = Runner"),
        ("        args.clear()", "        from torch._inductor import utils"),
    ],
)
def test_unknown_statements_and_names_are_refused(before: str, after: str) -> None:
    assert before in _CODE
    with pytest.raises(Uncacheable, match="the generated code"):
        reduce_code(_CODE.replace(before, after))
