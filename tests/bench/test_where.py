"""The parts of each workload are measured with it, and give a lower limit for its time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.kit import bare_work, tables
from bench.kit.measure import TINY, Result, Timings, WrongResult, random_bytes
from bench.kit.peers import HOLDFAST
from bench.kit.sections import PARTS, find_section
from bench.kit.states import State, copy_state
from bench.suites import where as where_suite
from bench.suites.where import WORKS, Work

_MIB = 1 << 20
_WORK = Work("save", ("hash", "write"), "write")


def _tell(hash_cpu: float, write: Timings) -> Result:
    timings = {"save": Timings((3.0, 2.0), (2.5, 3.0)), "hash, 2 cores": Timings((1.0,), (hash_cpu,)), "write": write}
    return where_suite.make_work_row(_WORK, timings, 1 << 30, cores=2)


def test_a_workload_is_compared_with_the_processor_time_of_its_parts() -> None:
    row = _tell(2.2, Timings((1.0, 1.1), (0.3, 0.2)))

    assert (row.figure, row.against) == (2.0, "its parts on 2 cores")
    assert row.limit == pytest.approx(1.2)
    assert row.note == "3.00 CPU s, 1.5 cores busy; hash 2.20 + write 0.20 = 2.40 CPU s; disk 1.00 s"


def test_a_workload_is_compared_with_the_disk_where_that_takes_longer() -> None:
    row = _tell(1.0, Timings((1.6, 1.5), (0.3, 0.2)))

    assert (row.against, row.limit) == ("its write", 1.5)
    assert row.goal is None


def test_the_seconds_of_a_workload_are_those_of_a_gibibyte() -> None:
    timings = {
        "save": Timings((0.5,), (1.0,)),
        "hash, 1 core": Timings((0.25,), (0.25,)),
        "write": Timings((0.1,), (0.1,)),
    }

    row = where_suite.make_work_row(_WORK, timings, 256 * _MIB, cores=1)

    assert (row.figure, row.against) == (2.0, "its parts on 1 core")
    assert row.limit == pytest.approx(1.4)


def test_cached_files_are_read_to_new_memory_by_several_threads(tmp_path: Path) -> None:
    data = random_bytes(bare_work.UNIT_BYTES + 5, seed=1)
    (tmp_path / "file").write_bytes(data)

    pieces = bare_work.read_to_new([tmp_path / "file"], threads=2)

    assert b"".join(pieces)[: len(data)] == data


def test_random_pages_begin_on_a_page() -> None:
    data = bare_work.random_pages(5 * _MIB + 3, seed=1)

    assert len(data) == 5 * _MIB + 3
    assert torch.frombuffer(data, dtype=torch.uint8).data_ptr() % 4096 == 0


def test_the_table_of_parts_shows_what_the_processor_did() -> None:
    row = Result("save, by parts", 2.0, "s/GiB", "its parts on 2 cores", 1.0, note="1.5 cores busy", why=PARTS)
    bare = Result("hash, 1 core", 0.5, "s/GiB", note="0.50 CPU s", why=PARTS)
    written = [
        {
            name: getattr(one, name)
            for name in ("workload", "figure", "unit", "against", "limit", "ratio", "note", "why")
        }
        for one in (row, bare)
    ]
    page = f"<!-- figures of {PARTS}, by `make docs` -->\n<!-- end of figures -->\n"

    filled = tables.fill_figures(page, {"results": written})

    assert "| save, by parts | 2 s/GiB | its parts on 2 cores: 1 | 2 | 1.5 cores busy |" in filled
    assert "| hash, 1 core | 0.5 s/GiB |  |  | 0.50 CPU s |" in filled


def test_a_wrong_load_in_the_race_with_its_parts_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_spoiled(folder: Path, like: State) -> State:
        spoiled = copy_state(HOLDFAST.load(folder, like))
        next(iter(spoiled.values())).view(-1).view(torch.uint8)[0].bitwise_xor_(1)
        return spoiled

    monkeypatch.setattr(where_suite, "drop_pages", lambda paths: None)
    monkeypatch.setattr(where_suite, "HOLDFAST", replace(HOLDFAST, load=load_spoiled))

    with pytest.raises(WrongResult, match="are not those that were saved"):
        where_suite.run(TINY, tmp_path)


def test_the_where_suite_measures_each_workload_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where_suite, "drop_pages", lambda paths: None)
    try:
        results = where_suite.run(TINY, tmp_path)
    except OSError:
        pytest.skip("this filesystem takes no direct writes")

    assert [row.workload for row in results[: len(WORKS)]] == [f"{work.name}, by parts" for work in WORKS]
    assert {find_section("where", row.workload) for row in results} == {PARTS}
    assert all(row.unit == "s/GiB" and row.figure > 0 and row.goal is None for row in results)
    assert all(row.limit and "cores busy" in row.note for row in results[: len(WORKS)])
    assert list(tmp_path.iterdir()) == []
