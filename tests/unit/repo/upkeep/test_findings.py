"""A finding carries what a program needs, and a tally starts at nothing."""

from __future__ import annotations

from dataclasses import asdict

from holdfast.repo.upkeep.findings import Finding, Tally


def test_a_finding_names_only_what_it_concerns() -> None:
    finding = Finding("note", "pack-unused", "packs/x", "no snapshot uses it", "`holdfast gc --yes` removes it")
    assert (finding.snapshot, finding.entry, finding.chunk, finding.pack) == ("", "", "", "")


def test_a_tally_starts_at_nothing() -> None:
    assert set(asdict(Tally()).values()) == {0}
