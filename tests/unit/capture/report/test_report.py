"""From two runs to a report: the rows around a fault, the summaries of their tensors, and the limits of both."""

from __future__ import annotations

from holdfast.capture.compare.compare import diff_runs
from holdfast.capture.report.report import ReportLimits, make_report
from holdfast.capture.stored.runs import Run, RunFacts
from tests.kit.recordings import FAULT, Recording, make_recorded
from tests.kit.runs_in_memory import make_run


def _make_run(name: str, *, is_bad: bool = False, level: str = "full", world: int = 1) -> Run:
    environment = {"torch": "2.13" if is_bad else "2.12"}
    return make_recorded(Recording(name, is_bad, level, world, notes=("slow disk",), environment=environment))


def test_the_origin_is_marked_among_the_rows_around_it() -> None:
    a, b = _make_run("good"), _make_run("bad", is_bad=True)

    report = make_report(a, b, diff_runs(a, b))

    assert report.origin is not None
    origin = report.rows[report.origin]
    assert (origin.verdict, origin.step, origin.fqn, origin.kind) == ("ORIGIN", *FAULT)
    assert [row.verdict for row in report.rows if row.step == 1] == [
        *["EQUAL"] * 3,
        "EQUAL",
        "EQUAL",
        "EQUAL",
        "ORIGIN",
        "PROPAGATED",
        "PROPAGATED",
    ]
    assert report.diff.headline.startswith("step 1, forward, layers.1: output differs")


def test_numbers_and_summaries_are_those_of_the_tensors() -> None:
    a, b = _make_run("good"), _make_run("bad", is_bad=True)

    report = make_report(a, b, diff_runs(a, b))

    assert report.origin is not None
    row, detail = report.rows[report.origin], report.details[report.origin]
    assert row.abs == 0.25
    assert row.pairing == "exact"
    assert detail.a is not None
    assert detail.b is not None
    assert detail.b.stats.maximum - detail.a.stats.maximum == 0.25
    assert (detail.a.low, detail.a.high) == (detail.b.low, detail.b.high)
    assert sum(detail.a.stats.histogram) == sum(detail.b.stats.histogram) == 12
    assert detail.at is not None


def test_the_notes_of_a_run_are_shown_once() -> None:
    a, b = _make_run("good"), _make_run("bad", is_bad=True)

    report = make_report(a, b, diff_runs(a, b))

    assert report.a.notes == ("slow disk",)
    assert not [note for note in report.notes if "slow disk" in note]


def test_runs_that_match_have_a_report_too() -> None:
    a, b = _make_run("good"), _make_run("good again")

    report = make_report(a, b, diff_runs(a, b))

    assert report.diff.is_match
    assert (report.origin, report.rows, report.details) == (None, (), {})
    assert report.steps[0] == (0, 1, 2)


def test_digests_alone_give_no_distance() -> None:
    a, b = _make_run("good", level="digest"), _make_run("bad", is_bad=True, level="digest")

    report = make_report(a, b, diff_runs(a, b))

    assert report.origin is not None
    row = report.rows[report.origin]
    assert (row.rel, row.abs, report.details) == (None, None, {})
    assert "digest" in row.note


def test_stored_numbers_are_shown_where_there_are_no_values() -> None:
    a, b = _make_run("good", level="stats"), _make_run("bad", is_bad=True, level="stats")

    report = make_report(a, b, diff_runs(a, b))

    assert report.origin is not None
    detail = report.details[report.origin]
    assert detail.a is not None
    assert detail.a.stats.histogram == (5, 7)
    assert all(report.details[at].b is not None for at, row in enumerate(report.rows) if row.verdict == "EQUAL")


def test_what_only_one_run_has_is_a_row() -> None:
    a = _make_run("good")
    extra = [event for step in a.steps for event in a.events(step)][:-1]
    b = make_run(RunFacts("short"), [event._replace(leaf="") for event in extra])

    report = make_report(a, b, diff_runs(a, b))

    assert [(row.verdict, row.fqn, row.note) for row in report.rows if row.verdict == "MISSING"] == [
        ("MISSING", "layers.2", "Only in good.")
    ]


def test_rows_and_summaries_stay_within_limits() -> None:
    a, b = _make_run("good"), _make_run("bad", is_bad=True)

    report = make_report(a, b, diff_runs(a, b), limits=ReportLimits(rows=5, summaries=1))

    assert len(report.rows) == 5
    assert sum(row.verdict != "EQUAL" for row in report.rows) == 3
    assert report.origin is not None
    drawn = [at for at, detail in report.details.items() if detail.a]
    assert drawn == [report.origin]


def test_rows_that_were_left_out_are_counted() -> None:
    a, b = _make_run("good"), _make_run("bad", is_bad=True)

    report = make_report(a, b, diff_runs(a, b), limits=ReportLimits(rows=1))

    assert len(report.rows) == 1
    assert report.origin == 0
    assert "2 more tensors differ; the table has the first 1." in report.notes


def test_a_run_of_two_ranks_is_shown_beside_one_of_one() -> None:
    a, b = _make_run("one"), _make_run("two", is_bad=True, world=2)

    report = make_report(a, b, diff_runs(a, b))

    assert report.origin is not None
    assert (report.rows[report.origin].fqn, report.b.world) == ("layers.1", 2)
    assert report.details[report.origin].b is not None
    assert {row.rank for row in report.rows} == {0}


def test_each_rank_has_its_rows() -> None:
    a, b = _make_run("good", world=2), _make_run("bad", is_bad=True, world=2)

    report = make_report(a, b, diff_runs(a, b))

    assert [row.rank for row in report.rows if row.verdict == "ORIGIN"] == [0, 1]
    assert len(report.rows) == 2 * 9 * 2
    assert report.origin is not None
    assert report.rows[report.origin].rank == 0
