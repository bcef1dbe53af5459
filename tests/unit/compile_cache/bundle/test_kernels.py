"""Kernels are named by their source, recorded while a graph is compiled, and supplied while it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor.codecache import CppCodeCache

from holdfast.compile_cache.bundle.kernels import _KernelSource, record_kernels, supply_kernels

SOURCE = "int f() { return 1; }"
_Cache: Any = CppCodeCache


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the sources that torch has built; each becomes a library file with the source as its bytes."""
    sources: list[str] = []

    def load_async(_: Any, /, main_code: str, **__: Any) -> Callable[[], Any]:
        sources.append(main_code)
        path = tmp_path / f"{len(sources)}.so"
        path.write_text(main_code, encoding="utf-8")
        return lambda: SimpleNamespace(__file__=str(path))

    monkeypatch.setattr(CppCodeCache, "load_async", classmethod(load_async))
    return sources


def _name(*arguments: Any, **others: Any) -> str:
    return _KernelSource(arguments, others).name(CppCodeCache)


def test_the_name_of_a_kernel_in_a_store_never_changes() -> None:
    # Stored artifacts contain these names: with another one, a hit would build its kernels again.
    assert _name(SOURCE) == "98bb28d5d48d546e73cf8e1824e09d5d085ffcbc8f2d9cb482be975f0cc41623"


def test_a_kernel_is_named_by_its_arguments_however_they_are_passed() -> None:
    assert _name(SOURCE, "cpu") == _name(SOURCE, device_type="cpu") == _name(SOURCE, submit_fn=print)
    assert _name(SOURCE, extra_flags=("-O3",)) != _name(SOURCE)


def test_kernels_are_recorded_with_their_system_and_read_if_the_code_uses_them(built: list[str]) -> None:
    with record_kernels("here") as recorded:
        _Cache.load_async(SOURCE)
        _Cache.load_async("int unused() { return 2; }")

    assert recorded.read(f"async_compile.cpp('''{SOURCE}''')") == {_name(SOURCE): built[0].encode()}
    assert built[0] == f"{SOURCE}\n// built for here\n"


def test_supplied_kernels_are_loaded_and_others_are_built(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CppCodeCache, "_load_library", staticmethod(lambda path, _: Path(path).read_bytes()))

    with supply_kernels({_name(SOURCE): b"library"}):
        supplied = _Cache.load_async(SOURCE)()
        _Cache.load_async("int other() { return 2; }")

    assert supplied == b"library"
    assert built == ["int other() { return 2; }"]


def test_torch_loads_its_own_kernels_outside_of_a_block(built: list[str]) -> None:
    with supply_kernels({_name(SOURCE): b"library"}):
        pass

    _Cache.load_async(SOURCE)

    assert built == [SOURCE]
