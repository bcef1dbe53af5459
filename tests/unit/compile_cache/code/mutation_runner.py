"""A process that has imported torch, and forks a child for each version of each mutation.

Run as `python -m tests.unit.compile_cache.code.mutation_runner <what> <folder>`, with the names of mutations on
standard input. A line of JSON is written for each. `what` is `keys` for the key alone, `answers` for the key and the
result of plain torch, or `stores` for also the result with a store that all versions share. `calls` and `wholes` are
for callables that are stored as a whole: their keys, and also the result with a store.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.backends.debugging
import torch._inductor.compile_fx
import torch._inductor.cpu_vec_isa
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

import holdfast
from holdfast.compile_cache.backend import make_compiler
from holdfast.compile_cache.key.key import make_key
from holdfast.compile_cache.key_parts import Uncacheable
from holdfast.compile_cache.whole.known_calls import CallDescription
from holdfast.objects.url import open_store
from holdfast.repo.handle.repository import open_repository
from tests.kit.graph_keys import record_keys
from tests.unit.compile_cache.code.mutations import AFTER, BEFORE, MUTATED_CALLABLES, MUTATIONS, Mutation


def load(mutation: Mutation, number: str, folder: Path) -> Any:
    """Write and import one version of a package."""
    write(mutation, number, folder)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    return importlib.import_module("mutated.operator")


def write(mutation: Mutation, number: str, folder: Path) -> None:
    """Write one version of a package, and set its environment variables."""
    for path, text in mutation.list_files(number).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for name, value in mutation.way.environ.items():
        os.environ[name] = value.replace("NUMBER", number)


def describe_key(module: Any) -> dict[str, Any]:
    """Return the key of a graph that calls the operator. It is built without dynamo, which takes much longer."""
    graph = Graph()
    x = graph.placeholder("x")
    with FakeTensorMode() as mode:
        x.meta["example_value"] = mode.from_tensor(module.make_input())
    target = module.op._opoverload if hasattr(module, "op") else torch.erfc
    graph.output((graph.call_function(target, (x,)),))
    try:
        found = make_key(GraphModule({}, graph), [module.make_input()], options={}, versions={})
    except Uncacheable as error:
        return {"reason": error.reason}
    return {"key": found.digest}


def describe_results(module: Any, *, is_compilers: bool) -> dict[str, Any]:
    """Return the key of the traced graph, and the results of `aot_eager` and, if needed, of torch's compiler."""
    (found,) = record_keys(module.f, module.make_input())
    key = {"reason": found} if isinstance(found, str) else {"key": found.digest}
    with torch._inductor.config.patch(force_disable_caches=True):
        plain = {"plain": compute(module, "inductor")} if is_compilers else {}
    return {**key, **plain, "eager": compute(module, "aot_eager")}


def describe_stored(store: Path, module: Any, *, is_compilers: bool) -> dict[str, Any]:
    """Return also the result with a store, and whether it was a hit."""
    compiler = make_compiler(open_repository(open_store(str(store)), create=True))
    answer = compute(module, compiler)
    return {**describe_results(module, is_compilers=is_compilers), "answer": answer, "hits": compiler.statistics.hit}


def describe_call(mutation: Mutation, folder: Path, module: Any) -> dict[str, Any]:
    """Return the key of a call, its plain result, and whether a change in this process is overlooked."""
    x = module.make_input()
    found: dict[str, Any] = {"eager": module.f(x).flatten().tolist()}
    try:
        call = CallDescription(module.f, (x,), {}, {})
    except Uncacheable as error:
        return {**found, "reason": error.reason}
    found["key"] = call.key.digest
    callable_ = module.f
    reload(mutation, folder)
    is_noticed = call.is_stale() or call.match((x,), {}) is None
    return {**found, "missed": not is_noticed and callable_(x).flatten().tolist() != found["eager"]}


def reload(mutation: Mutation, folder: Path) -> None:
    """Change the number in this process: import the package again, into the same namespaces."""
    write(mutation, AFTER, folder)
    names = [name for name in sys.modules if name.partition(".")[0] == "mutated"]
    for name in sorted(names, key=lambda name: (name == "mutated.operator", -name.count("."))):
        importlib.reload(sys.modules[name])


def describe_whole(store: Path, module: Any) -> dict[str, Any]:
    """Return the result of a callable that is stored as a whole, and whether it was a hit."""
    torch._dynamo.reset()
    x = module.make_input()
    compiled: Any = holdfast.compile(module.f, store=store, whole=True)
    answer = compiled(x).flatten().tolist()
    statistics = compiled.compile_cache.statistics
    is_whole = not statistics.not_saved
    return {
        "eager": module.f(x).flatten().tolist(),
        "answer": answer,
        "saved": is_whole and statistics.miss > 0,
        "hits": statistics.hit if is_whole else 0,
    }


def compute(module: Any, backend: Any) -> list[list[float]]:
    """Return the output of a compiled function and, if there is one, its gradient."""
    torch._dynamo.reset()
    x = module.make_input()
    compiled: Any = torch.compile(module.f, backend=backend)
    output = compiled(x)
    if not output.requires_grad:
        return [output.flatten().tolist()]
    output.sum().backward()
    return [output.flatten().tolist(), x.grad.flatten().tolist()]


def run_in_child(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a call returns in a child of this process, or the error that ended it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writer, "w") as file:
            try:
                json.dump(call(), file)
            except BaseException:  # noqa: BLE001 - the parent reports it
                json.dump({"error": traceback.format_exc()}, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"error": "the child ended without a result"}


def run_both(mutation: Mutation, what: str, folder: Path) -> dict[str, Any]:
    """Run both versions of a mutation, one after the other."""
    describe: dict[str, Callable[[Any], dict[str, Any]]] = {
        "keys": describe_key,
        "answers": functools.partial(describe_results, is_compilers=mutation.place.is_compilers),
        "stores": functools.partial(describe_stored, folder / "store", is_compilers=mutation.place.is_compilers),
        "wholes": functools.partial(describe_whole, folder / "store"),
    }

    def run(number: str, place: Path) -> dict[str, Any]:
        module = load(mutation, number, place)
        return describe_call(mutation, place, module) if what == "calls" else describe[what](module)

    repeated = what in ("stores", "calls", "wholes")
    versions = {"before": BEFORE, "after": AFTER, **({"again": BEFORE} if repeated else {})}
    return {role: run_in_child(functools.partial(run, number, folder / role)) for role, number in versions.items()}


def main(what: str, folder: Path) -> None:
    """Run the mutations whose names are on standard input."""
    torch.set_num_threads(1)
    # Done once here instead of in every child: late imports, and the search of torch's tables.
    graph = Graph()
    graph.output((graph.call_function(torch.ones, ((1,),)),))
    make_key(GraphModule({}, graph), [], options={}, versions={})
    # With CUDA, autograd starts threads that a forked child would not have, so the children have to import more.
    needs_grad = torch.version.cuda is None
    warm: Any = torch.compile(torch.sin, backend="aot_eager")(torch.ones(2, requires_grad=needs_grad))
    if needs_grad:
        warm.sum().backward()
    gc.collect()
    gc.freeze()
    known = {mutation.name: mutation for mutation in (*MUTATIONS, *MUTATED_CALLABLES)}
    for place, line in enumerate(sys.stdin):
        mutation = known[line.rstrip("\n")]
        if (what in ("stores", "wholes") and mutation.place.makes_kernels) or (
            what == "answers" and mutation.place.is_compilers
        ):
            # Torch compiles programs to find the processor's vector instructions: once here, not in each child.
            torch._inductor.cpu_vec_isa.valid_vec_isa_list()
        sys.stdout.write(json.dumps({"name": mutation.name, **run_both(mutation, what, folder / str(place))}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
