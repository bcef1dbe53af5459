"""The verbs `import` and `export`, for files of other libraries, and those that check files against receipts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from holdfast.cli.lookup import open_to_read, open_to_write, read_named_snapshot
from holdfast.cli.output import Output, count, describe_saved, format_bytes
from holdfast.cli.verb import (
    add_compression,
    add_follow_links,
    add_json,
    add_metadata,
    document,
    parse_compression,
    parse_metadata,
)
from holdfast.digest import short_hex
from holdfast.errors import BadName
from holdfast.files.keep import verify_target
from holdfast.json_text import Json
from holdfast.repo.format.layout import verify_user_name
from holdfast.texts import list_some

if TYPE_CHECKING:
    from holdfast.formats.export import ExportOptions, ExportResult
    from holdfast.formats.importing import ImportOptions, ImportResult
    from holdfast.formats.receipt import Receipt, ReceiptFinding

_FORMATS: Final = ("safetensors", "hf", "torch", "dcp", "content-store", "deepspeed")
_EXPORT_FORMATS: Final = ("safetensors", "hf", "torch", "dcp")
_NAMED: Final = 5
"""How many names a note lists."""
_DTYPES: Final = ("float64", "float32", "float16", "bfloat16")


def declare_import(parser: ArgumentParser) -> None:
    """Declare the verb `import`."""
    more = (
        "SRC is a file or folder of safetensors, a folder of save_pretrained, a file of\n"
        "torch.save, a DCP directory, a content store of PyTorch, or a ZeRO checkpoint of\n"
        "DeepSpeed. The format is found by content. Nothing is unpickled: a file that\n"
        "contains more than tensors and plain values is refused, unless --unpickle is\n"
        "given. Files beside the weights, such as config.json, become entries. Links are\n"
        "followed to files in SRC, or in blobs/ of the Hugging Face cache that SRC is a\n"
        "part of; others are refused, unless --follow-links is given. The snapshot keeps\n"
        "a receipt with the digest of every tensor, for verify-import."
    )
    examples = [
        "holdfast import model.safetensors llama/base",
        "holdfast import last.pt run1/start --rename module.= --receipt r.json",
        "holdfast import out/ llama/half --dtype bfloat16",
    ]
    document(parser, more, examples=examples)
    parser.add_argument("source", metavar="SRC", help="a file or folder")
    parser.add_argument("name", metavar="NAME", help="the snapshot's name")
    _add_format(parser)
    parser.add_argument(
        "--rename",
        metavar="OLD=NEW",
        action="append",
        default=[],
        help="replace the prefix OLD of keys by NEW; may be repeated",
    )
    parser.add_argument(
        "--dtype",
        metavar="DTYPE",
        choices=_DTYPES,
        help=f"cast floating-point tensors to {', '.join(_DTYPES)}; the receipt states the error",
    )
    _add_unpickle(parser)
    add_follow_links(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the snapshot if the name exists, atomically")
    add_compression(parser)
    add_metadata(parser)
    parser.add_argument("--receipt", metavar="FILE", help="also write the receipt to a file")
    add_json(parser)
    parser.set_defaults(run_verb=run_import)


def _add_format(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--format", metavar="FORMAT", choices=_FORMATS, help=f"if a folder has several: {', '.join(_FORMATS)}"
    )


def _add_unpickle(parser: ArgumentParser) -> None:
    parser.add_argument("--unpickle", action="store_true", help="load the file with torch.load; this can run any code")


def _announce(options: Namespace, output: Output) -> None:
    if options.unpickle:
        output.note(f"unpickling {options.source}: this can run any code that the file contains")


def run_import(options: Namespace, url: str, output: Output) -> int:
    """Import a checkpoint, and print what was saved, cast and left out."""
    from holdfast.formats.importing import import_checkpoint
    from holdfast.formats.receipt import write_receipt
    from holdfast.trees.registered import Types

    verify_user_name(options.name)
    choices = _make_options(options)
    _announce(options, output)
    repo = open_to_write(url, output, compression=parse_compression(options.compression), delta=options.delta)
    if options.receipt:
        verify_target(repo, options.receipt)
    done = import_checkpoint(repo, options.source, options.name, choices, types=Types(()), progress=output.progress())
    if options.receipt:
        write_receipt(options.receipt, done.receipt)
    if options.json:
        output.json(_encode_imported(done))
    else:
        _print_result(done, output)
    return 0


def _encode_imported(done: ImportResult) -> dict[str, Json]:
    receipt = done.receipt
    counts: dict[str, Json] = {"tensors": len(receipt.tensors), "files": len(receipt.files)}
    left_out: list[Json] = [asdict(each) for each in receipt.left_out]
    return {**describe_saved(done.saved), "format": receipt.format, **counts, "left_out": left_out}


def _make_options(options: Namespace) -> ImportOptions:
    from holdfast.formats.importing import ImportOptions
    from holdfast.snapshot.save import describe_environment
    from holdfast.tensors.spec import find_dtype

    return ImportOptions(
        format=options.format,
        rename=_parse_renames(options.rename),
        dtype=find_dtype(options.dtype) if options.dtype else None,
        unpickle=options.unpickle,
        follow_links=options.follow_links,
        overwrite=options.overwrite,
        metadata=parse_metadata(options.meta),
        environment=describe_environment(),
    )


def _parse_renames(pairs: Iterable[str]) -> dict[str, str]:
    renames: dict[str, str] = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not equals or old in renames:
            raise BadName(f"--rename {pair!r} is not of the form OLD=NEW, or gives OLD twice")
        renames[old] = new
    return renames


def _print_result(done: ImportResult, output: Output) -> None:
    saved, receipt = done.saved, done.receipt
    files = f", {count(len(receipt.files), 'file')}" if receipt.files else ""
    what = f"{saved.name}: {count(len(receipt.tensors), 'tensor')}{files}, {format_bytes(saved.logical_bytes)}"
    if saved.existed:
        output.line(f"{what}; already present, nothing was written")
    else:
        sizes = f"{saved.describe_new()}, {format_bytes(saved.reused_bytes)} reused"
        ended = f"in {saved.seconds:.2f} s; digest {short_hex(saved.digest)}"
        output.line(f"imported {what} ({sizes}) from {receipt.format} {ended}")
    _print_casts(receipt, output)
    for left in receipt.left_out:
        output.note(f"left out: {left.name}; {left.reason}")


def _print_casts(receipt: Receipt, output: Output) -> None:
    casts = [(tensor.cast, tensor) for tensor in receipt.tensors if tensor.cast is not None]
    if not casts:
        return
    errors, worst = max(casts, key=lambda pair: pair[0].max_rel)
    overflowed = sum(cast.num_overflowed for cast, _ in casts)
    output.line(
        f"cast {count(len(casts), 'tensor')} to {worst.result.dtype}: largest relative error"
        f" {errors.max_rel:.3g} in {worst.name}, {count(overflowed, 'value')} overflowed"
    )


def declare_verify_import(parser: ArgumentParser) -> None:
    """Declare the verb `verify-import`."""
    more = (
        "Reads every byte of SRC, and compares dtype, shape and BLAKE3 of each tensor\n"
        "with a receipt: the one in the store (--against), whose snapshot is then also\n"
        "read and compared, or a file (--receipt), which needs no store. Never writes.\n"
        "Exits with 1 if anything is missing, added or different."
    )
    examples = [
        "holdfast verify-import model.safetensors --against llama/base",
        "holdfast verify-import model.safetensors --receipt receipt.json",
    ]
    document(parser, more, examples=examples)
    parser.add_argument("source", metavar="SRC", help="the file or folder that was imported")
    parser.add_argument("--against", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("--receipt", metavar="FILE", help="a receipt that `holdfast import --receipt` wrote")
    _add_format(parser)
    _add_unpickle(parser)
    add_follow_links(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run_verify_import, needs_store=lambda options: options.against is not None)


def run_verify_import(options: Namespace, url: str, output: Output) -> int:
    """Compare files with a receipt, and print each difference as soon as it is found."""
    from holdfast.formats.importing import read_import_receipt
    from holdfast.formats.receipt import read_receipt
    from holdfast.formats.verifying import check_import, check_stored

    if options.against is None and options.receipt is None:
        raise BadName("nothing to compare with: give --against NAME, --receipt FILE, or both")
    _announce(options, output)
    progress = output.progress()
    receipt = read_receipt(options.receipt) if options.receipt else None
    findings: list[ReceiptFinding] = []
    if options.against is None:
        assert receipt is not None, "one of the two is given"
    else:
        repo = open_to_read(url, output)
        snapshot = read_named_snapshot(repo.store, options.against, output)
        receipt = receipt or read_import_receipt(repo, snapshot)
        findings += _print_findings(check_stored(repo, snapshot, receipt, progress), options, output)
    how = {"unpickle": options.unpickle, "follow_links": options.follow_links}
    source = check_import(options.source, receipt, format=options.format, progress=progress, **how)
    findings += _print_findings(source, options, output)
    what = f"{count(len(receipt.tensors), 'tensor')} and {count(len(receipt.files), 'file')}"
    if options.json:
        output.json({"source": options.source, "findings": [asdict(finding) for finding in findings]})
    else:
        result = count(len(findings), "difference") if findings else "all equal"
        output.line(f"compared {what} of {options.source} with the receipt: {result}")
    return 1 if findings else 0


def _print_findings(found: Iterable[ReceiptFinding], options: Namespace, output: Output) -> list[ReceiptFinding]:
    findings = []
    for finding in found:
        findings.append(finding)
        if not options.json:
            output.line(str(finding))
    return findings


def declare_export(parser: ArgumentParser) -> None:
    """Declare the verb `export`."""
    more = (
        "DST is a file (safetensors, torch) or a folder (hf, dcp). It appears whole and\n"
        "verified, or not at all. A receipt with the digest of every tensor is written\n"
        "beside it: DST.receipt.json, or holdfast-receipt.json in the folder. What a\n"
        "format cannot contain is left out and named."
    )
    examples = [
        "holdfast export run1/step-500 model.safetensors --select model",
        "holdfast export run1/last out --format hf --select model --dtype bfloat16",
        "holdfast export run1/step-500 step-500.pt --format torch",
        "holdfast export run1/step-500 step-500 --format dcp --force",
    ]
    document(parser, more, examples=examples)
    parser.add_argument("name", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("destination", metavar="DST", help="the file or folder to create")
    parser.add_argument(
        "--format", choices=_EXPORT_FORMATS, default="safetensors", help="the format (default: safetensors)"
    )
    parser.add_argument(
        "--select", metavar="PREFIX", default="", help="only what is below this name, without the name itself"
    )
    parser.add_argument(
        "--exclude", metavar="PATTERN", action="append", default=[], help="leave these leaves out; may be repeated"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="cast floating-point tensors; the receipt states the error")
    parser.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="size of the files of hf and dcp (5GB)")
    parser.add_argument("--force", action="store_true", help="replace a file, or a folder of an earlier export")
    parser.add_argument("--receipt", metavar="FILE", help="write the receipt to this file")
    add_json(parser)
    parser.set_defaults(run_verb=run_export)


def run_export(options: Namespace, url: str, output: Output) -> int:
    """Export a snapshot, and print what was written, cast and left out."""
    from holdfast.formats.export import export

    chosen = _make_export_options(options)
    repo = open_to_read(url, output)
    snapshot = read_named_snapshot(repo.store, options.name, output)
    done = export(repo, snapshot, options.destination, chosen, progress=output.progress())
    if options.json:
        output.json(_encode_result(done))
    else:
        _print_exported(done, output)
    return 0


def _make_export_options(options: Namespace) -> ExportOptions:
    from holdfast.formats.export import ExportOptions
    from holdfast.tensors.spec import find_dtype

    return ExportOptions(
        format=options.format,
        select=options.select,
        exclude=options.exclude,
        dtype=find_dtype(options.dtype) if options.dtype else None,
        max_shard_size=int(options.max_shard_size) if options.max_shard_size.isdigit() else options.max_shard_size,
        replace=options.force,
        receipt=options.receipt,
    )


def _encode_result(done: ExportResult) -> dict[str, object]:
    receipt = done.receipt
    left_out = [asdict(each) for each in receipt.left_out]
    return {
        "path": done.path,
        "receipt": done.receipt_path,
        "format": receipt.format,
        "snapshot": receipt.snapshot,
        "digest": receipt.root.hex(),
        "tensors": len(receipt.tensors),
        "files": len(receipt.files),
        "bytes": done.num_bytes,
        "left_out": left_out,
    }


def _print_exported(done: ExportResult, output: Output) -> None:
    receipt = done.receipt
    files = f", {count(len(receipt.files), 'file')}" if receipt.files else ""
    what = f"{count(len(receipt.tensors), 'tensor')}{files}, {format_bytes(done.num_bytes)}"
    output.line(f"exported {receipt.snapshot} as {receipt.format} to {done.path}: {what}; receipt {done.receipt_path}")
    _print_casts(receipt, output)
    by_reason: dict[str, list[str]] = {}
    for each in receipt.left_out:
        by_reason.setdefault(each.reason, []).append(each.name)
    for reason, names in by_reason.items():
        output.note(f"left out: {list_some(names, _NAMED)}; {reason}")


def declare_verify_export(parser: ArgumentParser) -> None:
    """Declare the verb `verify-export`."""
    more = (
        "Reads every byte of DST, and compares dtype, shape and BLAKE3 of each tensor\n"
        "with a receipt: the one beside DST, or a file (--receipt). With --against, the\n"
        "snapshot is also read and compared; without it, no store is needed. Never\n"
        "writes. Exits with 1 if anything is missing, added or different."
    )
    examples = [
        "holdfast verify-export model.safetensors --against run1/step-500",
        "holdfast verify-export model.safetensors --receipt receipt.json",
    ]
    document(parser, more, examples=examples)
    parser.add_argument("destination", metavar="DST", help="the file or folder that was exported")
    parser.add_argument("--against", metavar="NAME", help="a snapshot or a tag")
    parser.add_argument("--receipt", metavar="FILE", help="a receipt that `holdfast export` wrote")
    add_json(parser)
    parser.set_defaults(run_verb=run_verify_export, needs_store=lambda options: options.against is not None)


def run_verify_export(options: Namespace, url: str, output: Output) -> int:
    """Compare exported files with a receipt, and print each difference as soon as it is found."""
    from holdfast.formats.receipt import read_receipt
    from holdfast.formats.verifying import check_export, check_exported, read_export_receipt

    progress, path = output.progress(), options.destination
    repo = None if options.against is None else open_to_read(url, output)
    receipt = read_receipt(options.receipt) if options.receipt else read_export_receipt(path)
    findings: list[ReceiptFinding] = []
    if repo is not None:
        snapshot = read_named_snapshot(repo.store, options.against, output)
        findings += _print_findings(check_exported(repo, snapshot, receipt, progress=progress), options, output)
    findings += _print_findings(check_export(path, receipt, progress=progress), options, output)
    _print_verdict(path, receipt, findings, options, output)
    return 1 if findings else 0


def _print_verdict(
    path: str, receipt: Receipt, findings: list[ReceiptFinding], options: Namespace, output: Output
) -> None:
    if options.json:
        output.json({"destination": path, "findings": [asdict(finding) for finding in findings]})
        return
    what = f"{count(len(receipt.tensors), 'tensor')} and {count(len(receipt.files), 'file')}"
    result = count(len(findings), "difference") if findings else "all equal"
    output.line(f"compared {what} of {path} with the receipt: {result}")
