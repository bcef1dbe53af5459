"""The pages of the API reference: which names each page has, and a page as plain Markdown or for the site.

Names are looked up in the source, without importing it: `make check` needs neither torch nor mkdocs for these pages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

FOLDER: Final = "docs/reference/api"
INDEX: Final = f"{FOLDER}/README.md"
_OF_STORE: Final = "holdfast.store."
"""Where the types are imported that methods of `Store` only take or return."""
_PARAMETER: Final = re.compile(r" {4}(\w+): (.*)")
_SELF: Final = re.compile(r"^(self|cls)(, /)?(, )?")
Definition = ast.ClassDef | ast.FunctionDef | ast.AnnAssign | ast.Assign


@dataclass(frozen=True, slots=True)
class ApiPage:
    """One page: its file, its title, what it is about, and the names that it describes."""

    file: str
    title: str
    about: str
    names: tuple[str, ...]
    """Dotted paths; `module.*` is every public name that the module defines or has in `__all__`."""


PAGES: Final = (
    ApiPage(
        "store.md",
        "Store and snapshots",
        "Open a store, save and load, list, compare, check and collect.",
        (
            "holdfast.open",
            "holdfast.Store",
            "holdfast.store.OpenOptions",
            "holdfast.Snapshot",
            "holdfast.LazyTensor",
            "holdfast.store.SaveResult",
            "holdfast.store.Follower",
            "holdfast.store.StoreServer",
            "holdfast.store.Restored",
            "holdfast.store.SaveHandle",
            "holdfast.store.ExportResult",
            "holdfast.store.ExportHandle",
            "holdfast.store.Mirror",
            "holdfast.mirror.upload.MirrorState",
            "holdfast.store.Tag",
            "holdfast.store.Bisection",
            "holdfast.store.Diff",
            "holdfast.store.Finding",
            "holdfast.store.PrunePlan",
            "holdfast.store.Pruned",
            "holdfast.store.Rules",
            "holdfast.store.Collected",
            "holdfast.store.HandleStatistics",
            "holdfast.progress.Progress",
            "holdfast.progress.ProgressUpdate",
        ),
    ),
    ApiPage(
        "training.md",
        "Training state",
        "What a training loop saves besides weights, when it saves and stops, and calls that can be run again.",
        (
            "holdfast.RngState",
            "holdfast.ResumableSampler",
            "holdfast.TrainingState",
            "holdfast.training_state",
            "holdfast.checkpointing.CheckpointManager",
            "holdfast.checkpointing.Saved",
            "holdfast.Call",
        ),
    ),
    ApiPage(
        "ranks.md",
        "Many ranks",
        "Shards, values that each rank has for itself, and collectives with a time limit.",
        (
            "holdfast.shard",
            "holdfast.per_rank",
            "holdfast.distributed.talk.collectives.Collectives",
            "holdfast.distributed.checkpoint.module_sync.sync_module_states",
            "holdfast.distributed.checkpoint.module_sync.sync_tensors",
            "holdfast.distributed.checkpoint.module_sync.verify_shapes_across_ranks",
        ),
    ),
    ApiPage(
        "dcp.md",
        "torch.distributed.checkpoint",
        "Use a Holdfast store from code that calls DCP.",
        ("holdfast.dcp.*",),
    ),
    ApiPage(
        "transformers.md",
        "Hugging Face Trainer",
        "Keep the checkpoints of the Hugging Face Trainer in a store.",
        ("holdfast.integrations.transformers.use_store",),
    ),
    ApiPage(
        "accelerate.md",
        "Accelerate",
        "Keep what `accelerator.save_state` saves in a store.",
        ("holdfast.integrations.accelerate.use_store", "holdfast.integrations.accelerate.AcceleratorCheckpoints"),
    ),
    ApiPage(
        "lightning.md",
        "Lightning",
        "Keep the checkpoints of a Lightning `Trainer` in a store.",
        ("holdfast.integrations.lightning.*",),
    ),
    ApiPage(
        "deepspeed.md",
        "DeepSpeed",
        "Keep the checkpoints of a DeepSpeed engine in a store.",
        ("holdfast.integrations.deepspeed.*",),
    ),
    ApiPage(
        "ray.md",
        "Ray Train",
        "Keep the checkpoints of Ray Train's workers in a store.",
        ("holdfast.integrations.ray.*",),
    ),
    ApiPage(
        "torchtitan.md",
        "TorchTitan",
        "Keep the checkpoints of TorchTitan's trainer in a store.",
        ("holdfast.integrations.torchtitan.*",),
    ),
    ApiPage(
        "compile.md",
        "Compile cache",
        "Compiled graphs that the next process loads instead of compiling.",
        ("holdfast.compile", "holdfast.store.Compiler"),
    ),
    ApiPage(
        "runs.md",
        "Recorded runs",
        "Record a run, compare two, find the first NaN, run one call again.",
        (
            "holdfast.store.Recorder",
            "holdfast.store.Run",
            "holdfast.store.RunFacts",
            "holdfast.store.RunDiff",
            "holdfast.capture.compare.compare.assert_runs_match",
            "holdfast.capture.compare.nan.find_nonfinite",
            "holdfast.capture.record.replay.replay",
        ),
    ),
    ApiPage(
        "content-store.md",
        "Content store",
        "PyTorch's private content store, with the same names, over a Holdfast store.",
        ("holdfast.content_store.*",),
    ),
    ApiPage(
        "helpers.md",
        "Helpers for tensors and trees",
        "Documented replacements for private functions of PyTorch.",
        (
            "holdfast.tensors.storage.alloc_storage",
            "holdfast.tensors.storage.free_storage",
            "holdfast.tensors.storage.is_allocated",
            "holdfast.tensors.storage.assert_logged",
            "holdfast.tensors.sharding.find_tensor_shard",
            "holdfast.tensors.sharding.find_state_dict_object",
            "holdfast.trees.apply.apply_to_tensors",
            "holdfast.trees.apply.pack_kwargs",
            "holdfast.trees.apply.unpack_kwargs",
            "holdfast.trees.apply.cast_floating",
            "holdfast.trees.apply.move_to_device",
            "holdfast.trees.apply.to_kwargs",
            "holdfast.trees.pick.replace_by_prefix",
            "holdfast.repo.format.boxes.*",
            "holdfast.repo.read.stream.RangeView",
        ),
    ),
    ApiPage(
        "object-stores.md",
        "Object stores and the repository",
        "For people who write an object store, or work with bytes below the tensors.",
        (
            "holdfast.objects.protocol.ObjectStore",
            "holdfast.objects.protocol.*",
            "holdfast.objects.memory.MemoryStore",
            "holdfast.repo.handle.repository.open_repository",
            "holdfast.repo.handle.repository.Repository",
            "holdfast.repo.format.source.BytesSource",
            "holdfast.repo.write.writer.Request",
            "holdfast.repo.write.writer.WriteOptions",
            "holdfast.repo.write.writer.save",
            "holdfast.repo.upkeep.check.Checker",
        ),
    ),
    ApiPage(
        "testing.md",
        "Testing",
        "The contract suite for object stores, stores that fail on purpose, and ranks in one test.",
        (
            "holdfast.testing.store_contract.*",
            "holdfast.testing.faults.*",
            "holdfast.testing.ranks.*",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """A name of the API, and where the source defines it."""

    public: str
    home: str
    node: Definition

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring, on one line."""
        text = ast.get_docstring(self.node) if isinstance(self.node, ast.ClassDef | ast.FunctionDef) else ""
        return " ".join((text or "").split("\n\n")[0].split())


class NameNotFound(LookupError):
    """A page lists a name that the source does not define."""


def list_names(src: Path, page: ApiPage) -> list[Found]:
    """Return the names of a page in its order, those of `module.*` as the module lists them."""
    names: list[str] = []
    for name in page.names:
        if name.endswith(".*"):
            module = name.removesuffix(".*")
            names += (f"{module}.{each}" for each in _list_public(_parse_module(src, module)))
        else:
            names.append(name)
    # The page of errors describes the error that a module offers again.
    every = [find_name(src, name) for name in dict.fromkeys(names)]
    return [found for found in every if not found.home.startswith("holdfast.errors.")]


def find_name(src: Path, name: str) -> Found:
    """Return where `name` is defined, following imports; raise NameNotFound."""
    module, _, last = name.rpartition(".")
    for node in _iter_statements(_parse_module(src, module)):
        match node:
            case ast.ClassDef(name=defined) | ast.FunctionDef(name=defined) if defined == last:
                return Found(name, f"{module}.{last}", node)
            case ast.AnnAssign(target=ast.Name(id=defined)) | ast.Assign(targets=[ast.Name(id=defined)]) if (
                defined == last
            ):
                return Found(name, f"{module}.{last}", node)
            case ast.ImportFrom(module=str(origin), names=aliases):
                for alias in aliases:
                    if (alias.asname or alias.name) == last:
                        found = find_name(src, f"{origin}.{alias.name}")
                        return Found(name, found.home, found.node)
            case _:
                pass
    raise NameNotFound(f"{name}: {module} has no such name; correct the list in docs/api.py")


def _parse_module(src: Path, module: str) -> ast.Module:
    path = src / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        raise NameNotFound(f"there is no module {module}; correct the list in docs/api.py")
    return _parse(file.read_text(encoding="utf-8"))


@lru_cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _iter_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and those under `if TYPE_CHECKING:`."""
    for node in tree.body:
        yield node
        if isinstance(node, ast.If):
            yield from node.body


def _list_public(tree: ast.Module) -> list[str]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=items)):
                return [str(item.value) for item in items if isinstance(item, ast.Constant)]
            case _:
                pass
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in defined if not name.startswith("_")]


def render_page(src: Path, page: ApiPage) -> str:
    """Return a page as plain Markdown: each name with its summary, its public methods and fields, their parameters."""
    sections = [_render_name(src, found) for found in list_names(src, page)]
    return f"{page.about}\n\n{''.join(sections)}".rstrip() + "\n"


def _render_name(src: Path, found: Found) -> str:
    node = found.node
    signature = f"`{_spell(node)}`\n\n" if isinstance(node, ast.FunctionDef) else ""
    lines = _list_parameters(node) if isinstance(node, ast.FunctionDef) else []
    for spelled, text, parameters in _find_members(src, found).values():
        lines += [f"- `{spelled}`{': ' * bool(text)}{text}\n", *(f"    {line}" for line in parameters)]
    listed = "".join(lines) + "\n" if lines else ""
    summary = f"{found.summary}\n\n" if found.summary else ""
    return f"## `{shorten(found)}`\n\n{summary}{signature}{listed}"


def _list_parameters(function: ast.FunctionDef) -> list[str]:
    """Return a line for each parameter that the docstring describes under `Args:`."""
    _, _, section = (ast.get_docstring(function) or "").partition("\nArgs:\n")
    lines: list[str] = []
    for line in section.splitlines():
        if not line.startswith("    "):
            break
        if named := _PARAMETER.match(line):
            lines.append(f"- `{named[1]}`: {named[2]}")
        elif lines:
            lines[-1] += f" {line.strip()}"
    return [f"{line}\n" for line in lines]


def shorten(found: Found) -> str:
    """Return the path to import a name from: of a type that `Store` only returns, the name alone."""
    return found.public.rpartition(".")[2] if found.public.startswith(_OF_STORE) else found.public


def _find_members(src: Path, found: Found) -> dict[str, tuple[str, str, list[str]]]:
    """Return the public members by name: as it is called, its text and its parameters; those of bases come first."""
    members: dict[str, tuple[str, str, list[str]]] = {}
    for base in _iter_bases(src, found):
        members |= _find_members(src, base)
    return members | {
        spelled.partition("(")[0]: (spelled, text, parameters)
        for spelled, text, parameters in _iter_members(found.node)
    }


def _iter_bases(src: Path, found: Found) -> Iterator[Found]:
    module = found.home.rpartition(".")[0]
    for base in found.node.bases if isinstance(found.node, ast.ClassDef) else ():
        if isinstance(base, ast.Name) and (inherited := _find_own(src, f"{module}.{base.id}")):
            yield inherited


def _find_own(src: Path, name: str) -> Found | None:
    try:
        return find_name(src, name)
    except NameNotFound:  # a class of Python or of another library
        return None


def _iter_members(node: Definition) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each public method, property and documented field of a class, with the first paragraph and parameters."""
    if not isinstance(node, ast.ClassDef):
        return
    for number, child in enumerate(node.body):
        match child:
            case ast.FunctionDef(name=name) if not name.startswith("_"):
                summary = " ".join((ast.get_docstring(child) or "").split("\n\n")[0].split())
                yield _spell(child), summary, _list_parameters(child)
            case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                text = _read_field_text(node.body[number + 1 : number + 2]) or f"`{ast.unparse(child.annotation)}`"
                yield name, text, []
            case ast.Assign(targets=[ast.Name(id=name)]) if not name.startswith("_"):
                yield name, _read_field_text(node.body[number + 1 : number + 2]), []
            case _:
                pass


def _spell(function: ast.FunctionDef) -> str:
    """Return a method as it is called: `save(name, tree, *, overwrite=False)`; a property as its name."""
    if any(
        isinstance(each, ast.Name) and each.id in ("property", "cached_property") for each in function.decorator_list
    ):
        return function.name
    arguments = ast.parse(ast.unparse(function), mode="exec").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    for argument in ast.walk(arguments.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    words = ast.unparse(arguments.args)
    return f"{function.name}({_SELF.sub('', words)})"


def _read_field_text(after: Sequence[ast.stmt]) -> str:
    match after:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return " ".join(text.split("\n\n")[0].split())
        case _:
            return ""


def render_for_site(src: Path, page: ApiPage) -> str:
    """Return a page for mkdocstrings, which adds signatures, types and whole docstrings."""
    directives = [_render_directive(src, found) for found in list_names(src, page)]
    return f"{page.about}\n\n{chr(10).join(directives)}"


def _render_directive(src: Path, found: Found) -> str:
    # The name that users import; a type without one has the name of its home.
    directive = f"::: {found.home if found.public.startswith(_OF_STORE) else found.public}\n"
    if not any(_iter_bases(src, found)):
        return directive
    # mkdocstrings would begin with the members of the last base.
    return f"{directive}    options:\n      members: [{', '.join(_find_members(src, found))}]\n"


def render_index() -> str:
    """Return the first page: every page, and where the errors are."""
    lines = [f"- [{page.title}]({page.file}): {page.about}\n" for page in PAGES]
    return (
        "All that is public: the names of `holdfast`, and the modules that the documentation tells you to import."
        " A type without a module is what a method returns or takes; you do not need to import it. The site that"
        " `make docs` builds in `site/` has the same pages with types and whole docstrings.\n\n"
        + "".join(lines)
        + "- [Errors](../errors.md): every exception, as a tree.\n\n"
        "`holdfast.__version__` is the version, as text. Names that are not on these pages may change without notice.\n"
    )
