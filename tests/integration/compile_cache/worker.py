"""A process that compiles cases, with a store or without, and writes results and statistics as JSON."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import sys
from typing import Any

import torch

from holdfast.compile_cache.backend import Compiler, make_compiler
from holdfast.compile_cache.choices import CompilerOptions
from holdfast.errors import CompileCacheError
from holdfast.objects.url import open_store
from holdfast.repo.handle.repository import open_repository
from tests.integration.compile_cache.cases import CASES, afresh


def _digest(tensors: list[torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        hasher.update(
            tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        )
    return hasher.hexdigest()


def _run(name: str, compiler: Compiler | None) -> dict[str, Any]:
    compile_ = torch.compile if compiler is None else functools.partial(torch.compile, backend=compiler)
    told: dict[str, Any] = {}
    with afresh():
        try:
            told["digest"] = _digest(CASES[name](compile_))
        except CompileCacheError as error:
            told["error"] = str(error)
    if compiler is not None:
        told |= dataclasses.asdict(compiler.statistics)
    return told


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Run each case with a compiler of its own, so that each has its own statistics."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in request["cases"]:
        compiler = None
        if request["store"]:
            repo = open_repository(open_store(request["store"], read_only=request.get("read_only", False)), create=True)
            compiler = make_compiler(repo, options=CompilerOptions(**request["options"]))
            if request.get("prefetch") is not None:
                compiler.prefetch(request["prefetch"]).wait()
        results[name] = _run(name, compiler)
        results[name]["imported_compiler"] = "torch._inductor.lowering" in sys.modules
        if compiler is not None:
            results[name]["used"] = compiler.cache.used
        if request.get("plain"):
            results[name]["plain"] = _run(name, None)["digest"]
        if compiler is not None and request.get("explain"):
            results[name]["explained"] = [explained.headline for explained in compiler.explain()]
    return results


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.stdout.write("\n" + json.dumps(main(json.loads(sys.argv[1]))) + "\n")
