"""Finds user code in torch's tables of lowerings, decompositions, patterns and the like, and in its dispatcher.

An entry of a table belongs to torch if all functions in it come from files of the installed torch, Python or numpy. The
tables are long, so they are searched once, and again only if their contents have changed.

Kernels that `torch.library.Library` registers are in the dispatcher. It does not expose them, but it reports in which
file each library object was created.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch._library.custom_ops as custom_ops
import torch._library.simple_registry as registry

from holdfast.compile_cache.code.known import BUILTIN_NAMESPACES, find_user_code, is_builtin, is_in_torch


class TableEntry(NamedTuple):
    """An entry of one of torch's tables."""

    role: str
    """What the table contains, such as "lowering"."""
    subject: Any
    """What the entry applies to, usually an operator."""
    code: Any
    """A function, or an object that contains functions."""


# (module, name) of a table -> role of its entries. Modules that are not loaded contain no user code, and some versions
# of torch lack some of the tables.
_DICTIONARIES: Final[Mapping[tuple[str, str], str]] = {
    ("torch._inductor.lowering", "lowerings"): "lowering",
    ("torch._inductor.lowering", "user_lowerings"): "preferred lowering",
    ("torch._inductor.lowering", "_maybe_layout_constraints"): "layout constraint",
    ("torch._inductor.decomposition", "decompositions"): "decomposition",
    ("torch._decomp.decompositions_for_rng", "extra_random_decomps"): "random decomposition",
    ("torch._subclasses.fake_impls", "op_implementations_dict"): "fake",
    ("torch._subclasses.fake_impls", "op_implementations_checks"): "fake by condition",
    ("torch._subclasses.fake_impls", "FAST_OP_IMPLEMENTATIONS"): "fast fake",
    ("torch._inductor.template_heuristics.registry", "_TEMPLATE_HEURISTIC_REGISTRY"): "template heuristic",
    ("torch._inductor.heuristics.registry", "_HEURISTIC_REGISTRY"): "heuristic",
    ("torch._inductor.choices", "_registered_inductor_choices"): "choices",
    ("torch._inductor.fx_passes.group_batch_fusion", "PRE_GRAD_FUSIONS"): "fusion before autograd",
    ("torch._inductor.fx_passes.group_batch_fusion", "POST_GRAD_FUSIONS"): "fusion after autograd",
}
# Torch itself adds nothing to these tables.
_ONLY_USER_CODE: Final = frozenset({"preferred lowering", "choices"})
# The first entry that applies overrides the others, so their order is part of the key.
_ORDERED: Final = frozenset({"fake by condition", "choices"})
_PASSES: Final = "torch._inductor.fx_passes."
PATTERN: Final = "pattern"
KERNELS: Final = "Python kernels"

# Files of torch that create libraries on behalf of user code, and namespaces that only torch itself uses.
_ON_BEHALF: Final = (os.path.join("torch", "library.py"), os.path.join("torch", "_library", "custom_ops.py"))
_OWN: Final = frozenset({"_native"})
_ANY_OPERATOR: Final = "_"


class TableWatch:
    """Finds user code in torch's tables. Searches a table again only if it has changed."""

    def __init__(self) -> None:
        self._contents: dict[str, list[Any]] = {}
        self._user_code: dict[str, list[TableEntry]] = {}
        self._known: dict[int, object] = {}
        self._tables: tuple[_Table, ...] = (
            _PythonKernels(),
            _RegisteredCode(),
            _Patterns(),
            _DeviceBackends(),
            _ChoicesHandler(),
            _NativeKernels(),
        )

    def list_user_code(self) -> list[TableEntry]:
        """Return the entries that are or contain code from outside of torch, Python and numpy."""
        found: list[TableEntry] = []
        for role, table in _iter_dictionaries():
            found += self._compare(role, [*table, *table.values()], table.items)
        for each in self._tables:
            found += self._compare(each.role, each.list_contents(), each.list_rows)
        return found

    def _compare(
        self, role: str, contents: list[Any], list_rows: Callable[[], Iterable[tuple[Any, Any]]]
    ) -> list[TableEntry]:
        # Lists of identical objects compare without calling their methods: about a thousand per microsecond.
        if contents != self._contents.get(role):
            self._contents[role] = contents
            self._user_code[role] = [
                TableEntry(role, subject, code)
                for subject, code in list_rows()
                if role in _ONLY_USER_CODE or find_user_code(code, self._known) is not None
            ]
        return self._user_code[role]


class _Table(Protocol):
    """A table that is not a plain dictionary."""

    role: str

    def list_contents(self) -> list[Any]:
        """Return the objects in the table; the list differs from the last one if the table has changed."""

    def list_rows(self) -> Iterable[tuple[Any, Any]]:
        """Return the subject and code of each entry. Called after `list_contents`."""


@functools.cache
def watch_tables() -> TableWatch:
    """Return the TableWatch of this process."""
    return TableWatch()


def iter_python_kernels(operator: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dispatch key, function) of the Python kernels that `py_impl` has added to an operator."""
    for table in (operator.py_kernels, operator.python_key_table, operator.functorch_table):
        yield from ((str(key), kernel) for key, kernel in table.items())


def iter_registered_code(name: str) -> Iterator[tuple[str, Any]]:
    """Yield (role, function) of the fakes and `__torch_dispatch__` rules that torch.library keeps for an operator."""
    entry = registry.singleton._data.get(name)
    if entry is not None:
        yield from (("fake", kernel.func) for kernel in entry.fake_impl.kernels)
        yield from ((f"rule for {kind.__qualname__}", rule) for kind, rule in entry.torch_dispatch_rules._data.items())


def find_out_variant(overload: Any) -> Any:
    """Return the operator that `register_out_variant` has set for an overload; None if there is none."""
    module = sys.modules.get("torch._library._out_variant")
    return getattr(module, "_manual_out_variant_registry", {}).get(overload)


def _iter_dictionaries() -> Iterator[tuple[str, Mapping[Any, Any]]]:
    for (module, variable), role in _DICTIONARIES.items():
        table = getattr(sys.modules.get(module), variable, {})
        if role in _ORDERED:
            pairs = table.items() if isinstance(table, dict) else [("entry", each) for each in table]
            table = {f"{name} {number}": code for number, (name, code) in enumerate(pairs)}
        yield role, table
    # Torch builds this table from others once; later additions to those are not used.
    in_use = getattr(sys.modules.get("torch._inductor.decomposition"), "fast_random_decomps", None)
    yield "decomposition in use", in_use() if in_use is not None and in_use.cache_info().currsize else {}
    for name, table in getattr(sys.modules.get("torch._decomp"), "global_decomposition_table", {}).items():
        yield f"decomposition for {name}", table


class _PythonKernels:
    """Python kernels of torch's own operators."""

    role = KERNELS

    def __init__(self) -> None:
        self._num_packets: list[int] = []
        self._packets: list[dict[str, Any]] = []
        self._num_overloads: list[int] = []
        self._operators: list[Any] = []
        self._filled: list[dict[Any, Any]] = []
        self._empty: list[dict[Any, Any]] = []

    def list_contents(self) -> list[Any]:
        namespaces = [vars(torch.ops)[name] for name in sorted(BUILTIN_NAMESPACES) if name in vars(torch.ops)]
        num_packets = [len(torch._ops._higher_order_ops), *(len(vars(each)) for each in namespaces)]
        if num_packets != self._num_packets:
            self._num_packets = num_packets
            values = chain.from_iterable(list(vars(each).values()) for each in namespaces)
            self._packets = [vars(each) for each in values if type(each) is torch._ops.OpOverloadPacket]
        num_overloads = list(map(len, self._packets))
        if num_overloads != self._num_overloads or any(self._empty):
            self._num_overloads = num_overloads
            self._sort()
        return list(chain.from_iterable(map(dict.values, self._filled)))

    def list_rows(self) -> Iterable[tuple[Any, Any]]:
        for each in self._operators:
            yield each, (*each.py_kernels.values(), *each.python_key_table.values(), *each.functorch_table.values())

    def _sort(self) -> None:
        """Separate tables with kernels from the many empty ones."""
        values = chain(torch._ops._higher_order_ops.values(), chain.from_iterable(map(dict.values, self._packets)))
        self._operators = [each for each in values if isinstance(each, torch._ops.OperatorBase)]
        tables = [
            table
            for each in self._operators
            for table in (each.py_kernels, each.python_key_table, each.functorch_table)
        ]
        self._filled = [table for table in tables if table]
        self._empty = [table for table in tables if not table]


class _RegisteredCode:
    """Fakes and `__torch_dispatch__` rules that torch.library keeps for torch's own operators."""

    role = "registration"

    def list_contents(self) -> list[Any]:
        contents: list[Any] = []
        for name, entry in registry.singleton._data.items():
            if is_builtin(name):
                contents += (*entry.fake_impl.kernels, *entry.torch_dispatch_rules._data.values())
        return contents

    def list_rows(self) -> Iterable[tuple[Any, Any]]:
        for name in registry.singleton._data:
            if is_builtin(name):
                yield name, tuple(code for _, code in iter_registered_code(name))


class _Patterns:
    """Patterns with which torch's compiler rewrites graphs."""

    role = PATTERN

    def __init__(self) -> None:
        self._num_modules = 0
        self._variables: list[tuple[dict[str, Any], str]] = []
        self._entries: list[Any] = []

    def list_contents(self) -> list[Any]:
        matcher = sys.modules.get("torch._inductor.pattern_matcher")
        if matcher is None:
            return []
        kind = matcher.PatternMatcherPass
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith(_PASSES)]
            variables = [(module, name) for module in modules for name in module]
            self._variables = [(module, name) for module, name in variables if any(_iter_passes(module[name], kind))]
        passes = [each for module, name in self._variables for each in _iter_passes(module.get(name), kind)]
        self._entries = [entry for each in passes for found in list(each.patterns.values()) for entry in found]
        # Compare ids, since different entries can be equal. `_entries` kept the last ones alive until now, so a new
        # entry cannot have the id of an old one.
        return list(map(id, self._entries))

    def list_rows(self) -> Iterable[tuple[Any, Any]]:
        for entry in self._entries:
            yield entry.pattern, tuple(value for name, value in vars(entry).items() if name != "pattern")


class _DeviceBackends:
    """Code generators and passes that `register_backend_for_device` has set for a kind of device."""

    role = "backend"

    def list_contents(self) -> list[Any]:
        return [each for _, code in self.list_rows() for each in code]

    def list_rows(self) -> Iterable[tuple[Any, Any]]:
        common = sys.modules.get("torch._inductor.codegen.common")
        names = ("device_op_overrides_dict", "custom_backend_passes", "custom_backend_codegen_configs")
        others = [getattr(common, name, {}) for name in names]
        for device, backend in getattr(common, "device_codegens", {}).items():
            yield device, (*vars(backend).values(), *(table.get(device) for table in others))


class _ChoicesHandler:
    """The object that makes the decisions of torch's compiler, if `V.set_choices_handler` has set one."""

    role = "choices handler"

    def list_contents(self) -> list[Any]:
        virtualized = sys.modules.get("torch._inductor.virtualized")
        # Torch creates its own object when it is first needed. Reading `V.choices` would create it now, and ignore
        # settings that the user changes later.
        return [] if virtualized is None else [getattr(virtualized.threadlocal, virtualized._choices._key, None)]

    def list_rows(self) -> Iterable[tuple[Any, Any]]:
        return [("the compiler", each) for each in self.list_contents()]


class _NativeKernels:
    """Kernels written in Python that replace those of torch's operators; see torch.backends.python_native."""

    role = "native kernel"

    def list_contents(self) -> list[Any]:
        return [each for _, code in self.list_rows() for each in code]

    def list_rows(self) -> Iterable[tuple[Any, Any]]:
        kernels = getattr(sys.modules.get("torch._native.registry"), "_graphs", {})
        for target, found in kernels.items():
            yield "/".join(target), tuple(code for each in found for code in (each.cond_fn, each.impl_fn))


def _iter_passes(value: Any, kind: type) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        yield from (each for each in value if isinstance(each, kind))
    elif isinstance(value, dict):
        yield from (each for each in value.values() if isinstance(each, kind))
    elif isinstance(value, kind):
        yield value


class LibraryKernel(NamedTuple):
    """A kernel, as recorded by torch.library."""

    operator: str
    """`namespace::name` or `namespace::name.overload`."""
    key: str
    """The dispatch key, such as "AutogradCPU"."""


class LibraryWatch:
    """Finds user kernels for operators of torch. Searches again only if libraries have changed."""

    def __init__(self) -> None:
        self._libraries: list[tuple[Any, int]] = []
        self._user_code: list[LibraryKernel] = []

    def list_user_code(self) -> list[LibraryKernel]:
        """Return the kernels for operators of torch that torch itself did not register."""
        # Compare finalizers: references to the libraries themselves would keep their kernels registered.
        libraries = [(finalizer, len(library._op_impls)) for finalizer, library in _iter_libraries()]
        if libraries != self._libraries:
            self._libraries = libraries
            self._user_code = [kernel for _, library in _iter_libraries() for kernel in _iter_user_kernels(library)]
        return self._user_code


@functools.cache
def watch_libraries() -> LibraryWatch:
    """Return the LibraryWatch of this process."""
    return LibraryWatch()


def list_library_kernels(operator_name: str, *, besides: object = None) -> list[LibraryKernel]:
    """Return the kernels of an operator, except those that the library object `besides` registered."""
    libraries = (library for _, library in _iter_libraries() if library is not besides)
    kernels = (kernel for library in libraries for kernel in _iter_library_kernels(library))
    return sorted(kernel for kernel in kernels if kernel.operator.partition(".")[0] == operator_name)


def _iter_libraries() -> Iterator[tuple[Any, Any]]:
    """Yield the finalizer and the object of each library that is alive."""
    finalizers: Any = weakref.finalize
    # A copy, made at once: a list of pairs can start Python's garbage collector, which removes finalizers.
    for finalizer, info in finalizers._registry.copy().items():
        if info.func is torch.library._del_library and (library := info.weakref()) is not None:
            yield finalizer, library


def _iter_library_kernels(library: Any) -> Iterator[LibraryKernel]:
    if library.m is None:
        return  # destroyed together with its kernels
    if library.ns == _ANY_OPERATOR:
        yield LibraryKernel("_::fallback", library.dispatch_key)
    for text in library._op_impls:
        namespace, name, key = text.split("/")
        yield LibraryKernel(f"{namespace}::{name}", key or "CompositeImplicitAutograd")


def _iter_user_kernels(library: Any) -> Iterator[LibraryKernel]:
    if library.ns == _ANY_OPERATOR:
        yield from _iter_library_kernels(library)
    elif is_builtin(f"{library.ns}::") and library.ns not in _OWN:
        kernels = sorted(_iter_library_kernels(library))
        # All kernels of a library object are registered in the same file, so one is enough.
        if kernels and not _is_from_torch(kernels[0]):
            yield from kernels


def _is_from_torch(kernel: LibraryKernel) -> bool:
    files = list(_iter_files(kernel))
    if any(file.endswith(_ON_BEHALF) for file in files):
        definition = custom_ops.OPDEFS.get(kernel.operator.partition(".")[0])
        return definition is not None and definition._init_fn.__module__.partition(".")[0] == "torch"
    # A Python kernel can override one of C++, whose file is a path on the machine that built torch.
    return all(is_in_torch(file) or file.endswith(".cpp") for file in files)


def _iter_files(kernel: LibraryKernel) -> Iterator[str]:
    """Yield the files that registered kernels for an operator and dispatch key, the active kernel first."""
    dump: str = torch._C._dispatch_dump(kernel.operator)
    for line in dump.splitlines():
        head, _, location = line.partition(": registered at ")
        if location and head.split("[")[0].split(" ")[0] == kernel.key:
            yield location.partition(" :: ")[0].rpartition(":")[0]
