from __future__ import annotations

import hashlib

from tests.slow.slices import choose_slice, plan_slices


def _tests(**counts: int) -> dict[str, list[str]]:
    return {f"{file}.py": [f"{file}.py::test_{number}" for number in range(count)] for file, count in counts.items()}


def test_every_test_is_in_one_slice() -> None:
    tests = _tests(long=40, short=3, new=5)
    seconds = {"long.py": 400.0, "short.py": 2.0, "deleted.py": 9.0}

    slices = plan_slices(tests, seconds, slice_s=100, part_s=50)

    everything = [test for names in tests.values() for test in names]
    assert sorted(test for chosen in slices for test in chosen) == sorted(everything)


def test_slices_are_equally_long() -> None:
    tests = _tests(long=40, short=4)
    seconds = {"long.py": 400.0, "short.py": 40.0}  # ten seconds for each test

    slices = plan_slices(tests, seconds, slice_s=100, part_s=20)

    assert sorted(len(chosen) for chosen in slices) == [8, 8, 8, 10, 10]


def test_the_tests_of_a_file_stay_together_if_they_are_short() -> None:
    tests = _tests(**{f"f{number}": 5 for number in range(12)})

    slices = plan_slices(tests, dict.fromkeys(tests, 30.0), slice_s=90, part_s=60)

    assert len(slices) == 4
    assert all(len({test.partition("::")[0] for test in chosen}) == 3 for chosen in slices)


def test_without_tests_there_is_an_empty_slice() -> None:
    assert plan_slices({}, {}, slice_s=90, part_s=60) == [[]]


def test_commits_run_all_slices() -> None:
    commits = [hashlib.sha256(bytes([number])).hexdigest()[:40] for number in range(100)]

    assert {choose_slice(commit, 12) for commit in commits} == set(range(12))
