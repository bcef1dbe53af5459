"""Another processor, build or version of torch is another system."""

from __future__ import annotations

import pytest

from holdfast.compile_cache.key import system as key_system
from holdfast.compile_cache.key_parts import PARTS
from tests.kit.graph_key_cases import BASE


def test_another_instruction_set_is_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    one = BASE()
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")

    other = BASE()

    assert [part for part in PARTS if one.digests[part] != other.digests[part]] == ["system"]
    assert (one.parts["system"]["cpu_isa"], other.parts["system"]["cpu_isa"]) == ("AVX512", "AVX2")


@pytest.mark.parametrize(
    "name", ["torch.__version__", "torch.version.git_version", "platform.machine", "sys.byteorder"]
)
def test_another_build_is_another_system(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = key_system.describe_system(())
    key_system._describe_process.cache_clear()
    monkeypatch.setattr(name, (lambda: "odd") if name == "platform.machine" else "odd")

    other = key_system.describe_system(())

    monkeypatch.undo()
    key_system._describe_process.cache_clear()
    assert one != other


def test_instructions_are_those_that_all_processors_support() -> None:
    cpuinfo = (
        "processor : 0\nflags\t\t: fpu sse avx avx512f hypervisor\nprocessor : 1\nflags\t\t: fpu sse avx md_clear\n"
    )

    assert key_system.parse_instructions(cpuinfo) == ["avx", "fpu", "sse"]


def test_instructions_of_other_machines_are_read_too() -> None:
    assert key_system.parse_instructions("Features\t: fp asimd sve\n") == ["asimd", "fp", "sve"]
    assert key_system.parse_instructions("model name : odd\n") == []
