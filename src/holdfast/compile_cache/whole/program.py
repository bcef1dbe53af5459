"""A compiled callable as plain data: generated code, how inputs and outputs are passed, connection to autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.errors import Corrupt
from holdfast.json_text import Json, canonical_json, parse_json

PROGRAM_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class GeneratedCode:
    """The code of a forward or backward."""

    source: str
    """Defines `call`, which takes a list of tensors and empties it."""
    kernels: Mapping[str, str]
    """Variable of the code -> digest of the library with its kernel."""
    externs: tuple[str, ...]
    """Functions of torch that the code calls by `extern_kernels`."""
    operators: tuple[str, ...]
    """Operators that the code calls, as `torch.ops.aten.name.overload`."""


@dataclass(frozen=True, slots=True)
class Tangent:
    """The layout that the backward expects of the gradient of an output."""

    output: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Autograd:
    """How forward and backward are connected to autograd."""

    num_saved: int
    """How many tensors the forward returns for the backward, after the outputs."""
    detached: tuple[int, ...]
    """Inputs that never need gradients."""
    without_gradient: tuple[int, ...]
    """Outputs that are not differentiable."""
    unsafe_views: tuple[int, ...]
    """Outputs that are views of a tensor that nothing else refers to."""
    tangents: tuple[Tangent, ...]
    deterministic: bool
    """Whether deterministic algorithms were required when it was compiled."""
    donated: bool
    """Whether the backward reuses the memory of saved tensors, and so can run only once."""


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled callable."""

    inputs: tuple[int, ...]
    """For each input of the forward, the number of the tensor in the description of the call."""
    num_outputs: int
    """How many outputs the graph has."""
    result: Json
    """The value that the callable returns; `{"output": n}` stands for an output of the graph."""
    mutated: tuple[int, ...]
    """Inputs that the forward changes and whose version counters autograd checks."""
    changes_inputs: bool
    """Whether the forward changes any input."""
    disable_autocast: bool
    forward: GeneratedCode
    backward: GeneratedCode | None
    autograd: Autograd | None
    """None if the program was compiled for inference."""


def encode_program(program: Program) -> bytes:
    """Return a program as JSON."""
    autograd = program.autograd
    return canonical_json(
        {
            "program": PROGRAM_FORMAT,
            "inputs": list(program.inputs),
            "num_outputs": program.num_outputs,
            "result": program.result,
            "mutated": list(program.mutated),
            "changes_inputs": program.changes_inputs,
            "disable_autocast": program.disable_autocast,
            "forward": _encode_code(program.forward),
            "backward": _encode_code(program.backward) if program.backward else None,
            "autograd": None
            if autograd is None
            else {
                "num_saved": autograd.num_saved,
                "detached": list(autograd.detached),
                "without_gradient": list(autograd.without_gradient),
                "unsafe_views": list(autograd.unsafe_views),
                "tangents": [[each.output, list(each.size), list(each.stride)] for each in autograd.tangents],
                "deterministic": autograd.deterministic,
                "donated": autograd.donated,
            },
        }
    )


def decode_program(data: bytes, name: str) -> Program:
    """Parse a program. Raises Corrupt, with the name of the artifact, if it is none."""
    try:
        found: Any = parse_json(data, where=name)
        if found["program"] != PROGRAM_FORMAT:
            raise Corrupt(f"{name!r} is a program of another format, {found['program']!r}", key=name)
        return Program(
            tuple(found["inputs"]),
            found["num_outputs"],
            found["result"],
            tuple(found["mutated"]),
            found["changes_inputs"],
            found["disable_autocast"],
            _decode_code(found["forward"]),
            _decode_code(found["backward"]) if found["backward"] else None,
            _decode_autograd(found["autograd"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{name!r} does not contain a program: {error!r}", key=name) from error


def _encode_code(code: GeneratedCode) -> Json:
    return {
        "source": code.source,
        "kernels": dict(code.kernels),
        "externs": list(code.externs),
        "operators": list(code.operators),
    }


def _decode_code(found: Any) -> GeneratedCode:
    return GeneratedCode(found["source"], found["kernels"], tuple(found["externs"]), tuple(found["operators"]))


def _decode_autograd(found: Any) -> Autograd | None:
    if found is None:
        return None
    return Autograd(
        found["num_saved"],
        tuple(found["detached"]),
        tuple(found["without_gradient"]),
        tuple(found["unsafe_views"]),
        tuple(Tangent(output, tuple(size), tuple(stride)) for output, size, stride in found["tangents"]),
        found["deterministic"],
        found["donated"],
    )
