"""Every import inside a function that is allowed: the file, what it imports there, and why not at the top."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tests.architecture.sources import Import, Source, iter_imports

_RUNS: Final = "needs torch, and `holdfast run --help` does not"
_STORE: Final = "needs torch, and opening, listing and checking a store does not"
_SPACE: Final = "needs numpy; the list of snapshots is shown without"
_SERVING: Final = "needs torch, which takes two seconds to import; the list of snapshots is shown without"
_WHOLE: Final = "imports torch's compiler, which takes two seconds; a callable that is stored as a whole does without"
_SAVING: Final = "imports what saves, which takes 0.1 s; a hit only reads"

LATE_IMPORTS: Final[dict[str, dict[str, str]]] = {
    "cli/grammar.py": {"holdfast.cli.verbs": "only the verb that was typed is imported: `ls` does not wait for `put`"},
    "cli/main.py": {"holdfast.cli.verbs.completion": "imports argcomplete; only a shell that completes needs it"},
    "cli/output.py": {"rich": "takes as long as all other imports together; only work of some length shows a bar"},
    "cli/verbs/cache.py": {"holdfast.compile_cache.key.system": "needs torch; only --other-systems uses it"},
    "cli/verbs/diff.py": {"holdfast.diff.values": "needs torch; only --values uses it"},
    "cli/verbs/doctor.py": {
        "holdfast.objects.cloud": "needs obstore; only the check of a bucket uses it",
        "holdfast.tensors.device_digest.choice": "needs torch; only --devices uses it",
    },
    "cli/verbs/files.py": {"holdfast.trees.outline": "a snapshot of files has no tree"},
    "cli/verbs/formats.py": {
        "holdfast.formats": "needs torch, and `holdfast import --help` does not",
        "holdfast.snapshot.save": "needs torch, as the import does",
        "holdfast.tensors.spec": "needs torch; only --dtype uses it",
        "holdfast.trees.registered": "needs torch, as the import does",
    },
    "cli/verbs/show.py": {"holdfast.diff.facts": "a snapshot of files has no leaves to describe"},
    "cli/verbs/run.py": {
        "holdfast.capture.compare": _RUNS,
        "holdfast.capture.report": _RUNS,
        "holdfast.capture.stored.runs": _RUNS,
        "holdfast.capture.stored.statistics": _RUNS,
    },
    "files/keep.py": {"holdfast.files.torch_archive": "takes as long as reading 10 MiB; only zip files need it"},
    "formats/writing/zip_layout.py": {"zlib_ng": "optional; zlib computes the same in six times the time"},
    "formats/writing/safetensors_file.py": {"huggingface_hub": "optional; only weights in several files need it"},
    "display/bars.py": {
        "tqdm": "optional, and imported only for a bar that the caller asked for",
        "rich": "takes as long as all other imports together; only a bar that the caller asked for needs it",
    },
    "tensors/device_digest/choice.py": {
        "holdfast.tensors.device_digest.triton_launch": "needs Triton, which torch for the CPU does not bring along"
    },
    "repo/format/codec.py": {
        "blosc2": "takes 0.2 s to import, more than all other imports; only encoded chunks need it",
        "numpy": "only deltas need it, and Blosc2 has imported it by then",
    },
    "objects/cloud/client.py": {
        "boto3": "optional, and takes 130 ms to import; only AWS profiles need it",
        "botocore": "comes with boto3",
        "obstore.auth": "imports boto3",
    },
    "objects/url.py": {"holdfast.objects.cloud": "obstore takes 50 ms to import; only URLs of buckets need it"},
    "compile_cache/cache.py": {
        "holdfast.compile_cache.artifacts.storing": _SAVING,
    },
    "compile_cache/whole/start.py": {
        "holdfast.compile_cache.artifacts.storing": _SAVING,
        "holdfast.compile_cache.backend": _WHOLE,
        "holdfast.compile_cache.whole.ordinary": _WHOLE,
    },
    "compiling.py": {
        "holdfast.compile_cache.backend": "imports torch's compiler; whole=True does without",
        "holdfast.compile_cache.whole": "only whole=True needs it",
    },
    "serving/answers/diffs.py": {"holdfast.diff.values": "needs torch; only a diff of values uses it"},
    "serving/routes.py": {
        "holdfast.serving.answers.sharing": _SPACE,
        "holdfast.serving.answers.movement": _SERVING,
        "holdfast.serving.answers.runs": _SERVING,
        "holdfast.serving.answers.tensors": _SERVING,
        "holdfast.snapshot.lazy": _SERVING,
        "holdfast.trees.registered": _SERVING,
    },
    "store.py": {
        "holdfast.capture": _STORE,
        "holdfast.checkpointing": _STORE,
        "holdfast.compile_cache.backend": _STORE,
        "holdfast.diff": _STORE,
        "holdfast.distributed.checkpoint": _STORE,
        "holdfast.formats": _STORE,
        "holdfast.mirror": "starts processes, and needs torch; opening, listing and checking a store does not",
        "holdfast.series": _STORE,
        "holdfast.serving": _STORE,
        "holdfast.snapshot": _STORE,
        "holdfast.trees.registered": _STORE,
    },
}
"""A name allows the module and everything below it."""


def is_allowed(source: Source, found: Import) -> bool:
    """Return whether the table has a line for a late import."""
    return any(covers(name, found) for name in LATE_IMPORTS.get(source.in_package, ()))


def find_unused(sources: Iterable[Source]) -> list[str]:
    """Return the lines of the table that no late import needs."""
    late = {source.in_package: [found for found in iter_imports(source) if found.late] for source in sources}
    return [
        f"{path}: {name}"
        for path, names in LATE_IMPORTS.items()
        for name in names
        if not any(covers(name, found) for found in late.get(path, ()))
    ]


def covers(name: str, found: Import) -> bool:
    """Return whether `name` is the imported module, or a package above it."""
    return f"{found.module}.".startswith(f"{name}.")
