"""The verb `mirror`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from holdfast.cli.lookup import open_for_plan, open_to_write
from holdfast.cli.output import Output, count, format_bytes
from holdfast.cli.verb import add_json, add_yes, document
from holdfast.errors import BadName, NotFound
from holdfast.json_text import Json
from holdfast.mirror.mirror import read_mirror_state, upload_now
from holdfast.mirror.setting import MirrorSetting, RecordedMirror, forget_mirror, make_setting, read_mirrors
from holdfast.mirror.upload import MirrorState
from holdfast.repo.handle.repository import Repository


def declare_mirror(parser: ArgumentParser) -> None:
    """Declare the verb `mirror`."""
    more = (
        "Shows what the mirrors of the store have and lack, and uploads nothing without\n"
        "--yes. A mirror is recorded in the store when something is first uploaded to it:\n"
        "by a program that opens the store with mirror=, or by this command. Snapshots\n"
        "that a recorded mirror lacks are not pruned. What is deleted here stays in the\n"
        "mirror. Exits with 1 if a mirror lacks something afterwards."
    )
    examples = [
        "holdfast mirror",
        "holdfast mirror s3://bucket/ckpts --yes",
        "holdfast mirror s3://bucket/ckpts --forget",
    ]
    document(parser, more, examples=examples)
    parser.add_argument(
        "url", metavar="MIRROR", nargs="?", help="path or URL of a mirror; without it, all that are recorded"
    )
    parser.add_argument("--forget", action="store_true", help="remove MIRROR from the record; its snapshots are kept")
    add_yes(parser)
    add_json(parser)
    parser.set_defaults(run_verb=run_mirror)


def run_mirror(options: Namespace, url: str, output: Output) -> int:
    """Print the state of the mirrors; upload what they lack with --yes. Returns 1 if one lacks something."""
    if options.forget:
        return _forget(options, url, output)
    repo = open_for_plan(url, output, is_applied=options.yes)
    states = [_bring_up_to_date(repo, each, options, output) for each in _list_settings(repo, options.url)]
    if options.json:
        output.json({"store": repo.store.url, "mirrors": [_describe(state) for state in states]})
    elif not states:
        output.line("this store has no mirror; `holdfast mirror URL --yes` makes one")
    else:
        for state in states:
            _print(state, output)
    waiting = sum(len(state.waiting) for state in states)
    if waiting and not options.yes:
        output.note(f"nothing was uploaded; repeat with --yes to upload {count(waiting, 'snapshot')}")
    return 1 if waiting else 0


def _list_settings(repo: Repository, url: str | None) -> list[MirrorSetting]:
    recorded = read_mirrors(repo.store)
    if url is not None:
        chosen = make_setting(url, store_url=repo.store.url).url
        recorded = {chosen: recorded.get(chosen, RecordedMirror())}
    for each, known in recorded.items():
        if known.options:
            raise BadName(
                f"the mirror {each} was opened with options ({', '.join(known.options)}), which this command cannot"
                " pass: open the store with mirror= and mirror_options= in Python and call store.mirror.sync(). If the"
                f" environment has them now, run `holdfast mirror {each} --forget` first"
            )
    return [MirrorSetting(each, scope=known.scope) for each, known in recorded.items()]


def _bring_up_to_date(repo: Repository, setting: MirrorSetting, options: Namespace, output: Output) -> MirrorState:
    if not options.yes:
        return read_mirror_state(repo, setting)
    return upload_now(repo, setting, progress=output.progress()).read()


def _forget(options: Namespace, url: str, output: Output) -> int:
    repo = open_to_write(url, output)
    if options.url is None:
        raise NotFound("give the URL of the mirror to forget; `holdfast mirror` lists them")
    wanted = make_setting(options.url, store_url=repo.store.url).url
    if not forget_mirror(repo, wanted):
        raise NotFound(f"{wanted} is not recorded as a mirror of {repo.store.url}; `holdfast mirror` lists them")
    output.note(f"{wanted} is no longer a mirror of this store; its snapshots are kept")
    return 0


def _print(state: MirrorState, output: Output) -> None:
    lacks = f"{count(len(state.waiting), 'snapshot')} waiting ({format_bytes(state.waiting_bytes)})"
    sent = f", {format_bytes(state.sent_bytes)} sent" if state.sent_bytes else ""
    output.line(f"{state.url}: {count(state.present, 'snapshot')} there, {lacks}{sent}")
    for name in state.waiting:
        output.line(f"    waiting: {name}")
    for name, reason in state.refused.items():
        output.line(f"    not uploaded: {name}: {reason}")
    if state.uploading:
        output.line(f"    {state.uploading}")
    if state.last_error:
        output.line(f"    the last upload failed: {state.last_error}")


def _describe(state: MirrorState) -> dict[str, Json]:
    return {
        "url": state.url,
        "present": state.present,
        "waiting": list(state.waiting),
        "waiting_bytes": state.waiting_bytes,
        "refused": dict(state.refused),
        "uploading": bool(state.uploading),
        "sent_bytes": state.sent_bytes,
        "last_error": state.last_error,
    }
