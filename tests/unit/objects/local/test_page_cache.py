"""How much of the page cache a reader may fill: a share of the memory that the machine and its control groups leave."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.objects.local.files import CacheShare, PosixFiles, find_available_memory

MEMORY = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    800 kB\nHugePages_Total:   0\n"
KIB = 1 << 10


@dataclass
class Machine:
    """The files in which a kernel describes its memory."""

    root: Path

    def find(self) -> int | None:
        return find_available_memory(
            str(self.root / "meminfo"), str(self.root / "cgroup"), str(self.root / "cgroup-root")
        )

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text, encoding="utf-8")

    def limit(self, group: str, most: str, used: int, stat: str) -> None:
        """Write the files of a group in version 2 of the hierarchy."""
        self.write(f"cgroup-root/{group}/memory.max", most + "\n")
        self.write(f"cgroup-root/{group}/memory.current", f"{used}\n")
        self.write(f"cgroup-root/{group}/memory.stat", stat)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = Machine(tmp_path)
    found.write("meminfo", MEMORY)
    return found


def test_without_control_groups_the_kernel_tells_what_is_available(machine: Machine) -> None:
    assert machine.find() == 800 * KIB


def test_without_a_description_of_the_memory_nothing_is_known(tmp_path: Path) -> None:
    assert Machine(tmp_path).find() is None


def test_a_group_leaves_its_limit_without_what_is_used_for_other_things_than_files(machine: Machine) -> None:
    machine.write("cgroup", "0::/jobs/one\n")
    machine.limit("jobs/one", "max", 5, "")
    machine.limit("jobs", str(500 * KIB), 400 * KIB, f"anon 7\nactive_file {20 * KIB}\ninactive_file {30 * KIB}\n")
    assert machine.find() == 150 * KIB


def test_a_group_that_is_over_its_limit_leaves_nothing(machine: Machine) -> None:
    machine.write("cgroup", "0::/one\n")
    machine.limit("one", "1000", 2000, "")
    assert machine.find() == 0


def test_a_container_that_sees_only_its_own_group_finds_the_limit_at_the_root(machine: Machine) -> None:
    machine.write("cgroup", "0::/hidden/by/the/container\n")
    machine.limit(".", str(100 * KIB), 40 * KIB, "")
    assert machine.find() == 60 * KIB


def test_groups_of_the_older_hierarchy_count_too(machine: Machine) -> None:
    machine.write("cgroup", "9:name=systemd:/\n4:cpu,memory:/one\n0::/\n")
    machine.write("cgroup-root/memory/one/memory.limit_in_bytes", str(300 * KIB))
    machine.write("cgroup-root/memory/one/memory.usage_in_bytes", str(200 * KIB))
    machine.write("cgroup-root/memory/one/memory.stat", f"total_inactive_file {10 * KIB}\ninactive_file 1\n")
    machine.write("cgroup-root/memory/memory.limit_in_bytes", str(1 << 62))
    machine.write("cgroup-root/memory/memory.usage_in_bytes", "0")
    assert machine.find() == 110 * KIB


@pytest.mark.parametrize("line", ["", "nonsense", "0:", "::", "0::/../x"])
def test_lines_of_another_kernel_are_ignored(machine: Machine, line: str) -> None:
    machine.write("cgroup", line + "\n")
    assert machine.find() == 800 * KIB


def test_this_machine_knows_its_memory() -> None:
    found = PosixFiles().find_available_memory()
    assert found is None or found > 0


def test_a_reader_may_fill_a_quarter_of_the_available_memory() -> None:
    share = CacheShare(lambda: 400)
    assert [share.take(size) for size in (60, 40, 0)] == [True, True, True]
    assert not share.take(1)


def test_after_the_first_bytes_without_room_no_others_are_let_in() -> None:
    share = CacheShare(lambda: 400)
    assert [share.take(size) for size in (90, 20, 5)] == [True, False, False]


def test_unknown_memory_leaves_no_room() -> None:
    assert not CacheShare(lambda: None).take(1)


def test_the_memory_is_read_once_and_only_if_bytes_are_wanted() -> None:
    asked: list[int] = []

    def find() -> int:
        asked.append(1)
        return 4_000_000

    share = CacheShare(find)
    assert not asked
    threads = [threading.Thread(target=share.take, args=(1000,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [1]
    assert share.take(1_000_000 - 8000)
    assert not share.take(1)
