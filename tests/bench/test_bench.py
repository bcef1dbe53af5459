"""The benchmarks run, and a contestant that is fast but wrong ends the run."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench.kit import measure
from bench.kit.measure import TINY, Contestant, Goal, Result, Timings, WrongResult, race, random_bytes
from bench.kit.stores import (
    check_store,
    fill_store,
    list_packs,
    load_entries,
    open_store,
    save_entries,
    verify_equal,
    verify_nothing_found,
)
from bench.suites import check as check_suite
from bench.suites import cli as cli_suite
from bench.suites import growth as growth_suite
from bench.suites import query as query_suite
from bench.suites import save as save_suite
from bench.suites.cli import verify_output


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_the_check_suite_measures_each_workload(tmp_path: Path) -> None:
    results = check_suite.run(TINY, tmp_path)

    assert {result.workload for result in results} == {
        "check --read, in page cache",
        "check --read, not in page cache",
        "check",
    }
    assert all(result.figure > 0 for result in results)


@pytest.mark.slow
def test_every_command_of_the_cli_suite_prints_what_the_suite_expects(tmp_path: Path) -> None:
    results = cli_suite.run(TINY, tmp_path)

    assert {result.unit for result in results} == {"ms"}


def test_the_save_suite_measures_each_workload(tmp_path: Path) -> None:
    results = save_suite.run(TINY, tmp_path)

    assert {result.unit for result in results} == {"GB/s", "%", "", "ms", "bytes"}
    assert all(result.figure >= 0 for result in results)


def test_the_growth_suite_measures_each_workload_and_leaves_nothing(tmp_path: Path) -> None:
    results = growth_suite.run(TINY, tmp_path)

    assert {result.unit for result in results} == {"ms", "us", "MB"}
    assert all(result.figure > 0 for result in results)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_query_suite_gets_the_same_answer_each_way(tmp_path: Path) -> None:
    results = query_suite.run(replace(TINY, growth=(2, 4, 80)), tmp_path)

    assert [result.unit for result in results] == ["ms"] * 4
    assert all(result.figure > 0 for result in results)


def test_a_grown_store_that_lacks_a_snapshot_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth_suite, "iter_names", lambda store, prefix="": iter(()))

    with pytest.raises(WrongResult, match="'latest under a prefix' in a store of"):
        growth_suite.run(TINY, tmp_path)


def test_a_check_that_finds_damage_ends_the_run(tmp_path: Path) -> None:
    fill_store(tmp_path, 1 << 20, packs=1)
    _damage(list_packs(tmp_path)[0])
    contestant = Contestant(
        partial(check_store, tmp_path, read=True), verify=partial(verify_nothing_found, read_bytes=1 << 20)
    )

    with pytest.raises(WrongResult, match="damaged"):
        race({"check": contestant}, rounds=1)


def test_a_check_that_reads_too_little_ends_the_run(tmp_path: Path) -> None:
    fill_store(tmp_path, 1 << 20, packs=1)

    with pytest.raises(WrongResult, match="1048576"):
        verify_nothing_found(check_store(tmp_path, read=False), read_bytes=1 << 20)


def test_a_load_of_other_bytes_ends_the_run(tmp_path: Path) -> None:
    entries = [("a", random_bytes(5000, seed=1)), ("b", random_bytes(5000, seed=2))]
    save_entries(open_store(tmp_path), "name", entries)
    changed = [entries[0], ("b", random_bytes(5000, seed=3))]
    contestant = Contestant(
        lambda: load_entries(open_store(tmp_path), "name"), verify=partial(verify_equal, entries=changed)
    )

    verify_equal(load_entries(open_store(tmp_path), "name"), entries=entries)
    with pytest.raises(WrongResult, match="'b'"):
        race({"load": contestant}, rounds=1)


def test_a_slow_contestant_may_run_fewer_rounds_and_be_verified_once() -> None:
    verified: list[object] = []
    slow = Contestant(lambda: "slow", most_rounds=1)
    steady = Contestant(lambda: "steady", verify=verified.append, verify_once=True)

    timings = race({"slow": slow, "steady": steady}, rounds=3)

    assert {name: len(found.seconds) for name, found in timings.items()} == {"slow": 1, "steady": 3}
    assert verified == ["steady"]


@pytest.mark.parametrize(
    ("code", "output"), [(1, b"run/step-9"), (0, b"something else")], ids=["failed", "said something else"]
)
def test_a_command_that_fails_ends_the_run(code: int, output: bytes) -> None:
    with pytest.raises(WrongResult):
        verify_output(subprocess.CompletedProcess(["holdfast"], code, output, b""), expected="run/step-9")


def test_pages_that_were_dropped_are_out_of_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert measure.count_resident_bytes(path) == 1 << 20
    try:
        measure.drop_pages([path])
    except WrongResult:
        pytest.skip("this filesystem lives in memory")

    assert measure.count_resident_bytes(path) == 0


@pytest.mark.parametrize(
    ("goal", "verdict"),
    [
        (Goal("ratio", ">=", 0.5), "pass"),
        (Goal("ratio", ">=", 0.6), "limit"),
        (Goal("figure", "<=", 1), "pass"),
        (Goal("figure", "<=", 0.9), "limit"),
        (None, ""),
    ],
)
def test_a_row_below_its_goal_is_called_a_limit(goal: Goal | None, verdict: str) -> None:
    result = Result("work", 1.0, "GB/s", "limit", 2.0, goal)

    assert result.verdict == verdict
    assert verdict in measure.format_table([result])


def test_a_row_below_its_goal_links_the_section_that_names_its_limit() -> None:
    passed, missed = (
        Result("work", 1.0, "GB/s", "raw", 2.0, Goal("ratio", ">=", ratio), why="first-save") for ratio in (0.5, 0.6)
    )

    assert "where-the-time-goes.md#first-save" in measure.format_table([missed])
    assert "where-the-time-goes.md" not in measure.format_table([passed])


def test_a_row_names_the_limit_that_was_measured_beside_it() -> None:
    raw = Result("work", 1.0, "GB/s", "raw", 4.0, Goal("ratio", ">=", 0.9), "median 1")
    hashed = Result("work", 1.0, "GB/s", "raw and hashed", 2.0)

    assert measure.name_bound(raw, hashed).note == "raw and hashed reached 0.50 of it, and this 0.50 of that; median 1"


def test_a_throughput_is_compared_with_the_fastest_peer() -> None:
    timings = {"own": Timings((2.0, 3.0)), "raw, 1": Timings((4.0, 2.0)), "raw, 2": Timings((1.0, 5.0))}

    result = measure.throughput("own", timings, 10**9, against="raw")

    assert (result.against, result.figure, result.limit) == ("raw, 2", 0.5, 1.0)


def test_the_json_file_contains_samples_and_verdicts(tmp_path: Path) -> None:
    result = Result("work", 1.0, "ms", goal=Goal("figure", "<=", 2), samples={"work": (0.001,)})

    measure.write_json(tmp_path / "new" / "out.json", {"cores": 2}, [result], {"save": 1.5})

    written = json.loads((tmp_path / "new" / "out.json").read_text())
    assert written["machine"] == {"cores": 2}
    assert written["suite_seconds"] == {"save": 1.5}
    assert written["results"][0]["verdict"] == "pass"
    assert written["results"][0]["samples"] == {"work": [0.001]}
