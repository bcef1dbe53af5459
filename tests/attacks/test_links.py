"""Links in a store: no verb reads, writes or deletes behind one, each ends with a sentence, and nothing is lost."""

from __future__ import annotations

import json
import os
from argparse import _SubParsersAction
from collections.abc import Iterator
from pathlib import Path

import pytest

from attacks.hostile import GOOD, build
from attacks.kernel_watch import KernelWatch
from attacks.links import BAIT, DIRECTORIES, KINDS, VERBS, Trap, build_trap
from attacks.run import capture_output
from holdfast.cli.main import build_parser, main
from tests.attacks.recorded_files import RecordedFiles
from tests.cli.runs import digest_tree
from tests.kit.saving import noise
from tests.kit.thinning import keep, thin

MAX_CALLS = 5000
"""A sound store of this size takes a few hundred calls a verb; the self-links, followed, would take any number."""


Ended = tuple[int, str, str]
"""Exit code, output, and what was said on standard error."""


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trap:
    """A trap without links yet; from then on every call of a local store is recorded."""
    trap = build_trap(tmp_path)
    build(tmp_path / "sound")
    (tmp_path / "file").write_bytes(noise(100_000))
    for module in ("local.local_store", "local.probe", "url"):
        monkeypatch.setattr(f"holdfast.objects.{module}.PosixFiles", RecordedFiles)
    RecordedFiles.begin()
    return trap


def run_verb(trap: Trap, verb: tuple[str, ...]) -> Ended:
    """Run one verb on the trap's store."""
    words = [str(trap.folder / word.lower()) if word.isupper() else word for word in verb]
    with capture_output() as (printed, said):
        code = main(["-s", str(trap.root), *words])
        return code, printed.text(), said.text()


def find_faults(trap: Trap) -> Iterator[str]:
    """Run every verb; yield whatever one did that it may not."""
    with KernelWatch(trap.outside) as watch:
        for verb in VERBS:
            RecordedFiles.begin()
            ended = run_verb(trap, verb)
            facts = [*find_bad_ends(ended), *RecordedFiles.astray, *watch.read_events()]
            if RecordedFiles.calls > MAX_CALLS:
                facts.append(f"made {RecordedFiles.calls} calls")
            yield from (f"{' '.join(verb)}: {fact}" for fact in facts)


def find_bad_ends(ended: Ended) -> Iterator[str]:
    code, _, error = ended
    if code not in (0, 1, 2) or "Traceback" in error or "this is a bug" in error:
        yield f"ended with {code}: {error[-600:]}"
    if code == 2 and not error.startswith("holdfast: "):
        yield "said nothing"


def verify_harmless(trap: Trap, place: str, kind: str) -> None:
    links = trap.plant(place, kind)
    whole = digest_tree(trap.folder)
    assert run_verb(trap, ("gc", "--yes", "--min-age", "0s"))[0] == (2 if links else 0)
    assert digest_tree(trap.folder) == whole or not links
    before = digest_tree(trap.outside)

    findings = json.loads(run_verb(trap, ("check", "--json"))[1])["findings"]
    assert sorted(finding["key"] for finding in findings if finding["code"] == "link") == sorted(links)
    assert list(find_faults(trap)) == []
    assert digest_tree(trap.outside) == before

    trap.undo(links)
    findings = json.loads(run_verb(trap, ("check", "--read", "--json"))[1])["findings"]
    assert [finding for finding in findings if finding["severity"] != "note"] == []
    assert run_verb(trap, ("cat", "good", "config.json")) == (0, GOOD["config.json"].decode(), "")


@pytest.mark.parametrize("place", thin(DIRECTORIES))
def test_a_directory_that_leads_outside_is_reported_and_never_entered(trap: Trap, place: str) -> None:
    verify_harmless(trap, place, "outside")


@pytest.mark.parametrize("place", keep(["packs", "snapshots"], "packs"))
def test_links_to_the_directory_they_lie_in_cost_nothing(trap: Trap, place: str) -> None:
    verify_harmless(trap, place, "self-links")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "outside"])
@pytest.mark.parametrize("place", DIRECTORIES)
def test_any_link_is_reported_and_never_followed(trap: Trap, place: str, kind: str) -> None:
    verify_harmless(trap, place, kind)


def test_every_verb_of_the_command_line_is_tried() -> None:
    verbs = next(action for action in build_parser()._actions if isinstance(action, _SubParsersAction))
    tried = {verb[0] for verb in VERBS}

    assert set(verbs.choices) <= tried


def test_the_measures_notice_a_link_that_is_followed(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    class Following(RecordedFiles):
        def open_file(self, path: str) -> int:
            return self._note_handle("open_file", path, os.open(path, os.O_RDONLY))

    trap.plant("config", "outside")
    files = Following(str(trap.root))
    with KernelWatch(trap.outside) as watch:
        files.close(files.open_file(str(trap.root / "config/00000000")))
        os.unlink(trap.outside / "config" / BAIT[0])
        events = watch.read_events()

    assert any("acted in" in text for text in RecordedFiles.astray)
    assert any("opened" in text for text in events)
    assert any(text.endswith(f"{BAIT[0]}: deleted") for text in events)
