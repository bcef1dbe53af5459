"""The pins of a pair are those of constraints.txt, with the pair's own in their place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.matrix.environments import (
    CannotBuild,
    describe_wanted,
    find_interpreter,
    find_not_pinned,
    find_place,
    list_pairs,
    parse_pins,
    read_pins,
)


def test_pins_are_parsed_with_the_names_that_pip_compares() -> None:
    text = "# a remark\nJinja2==3.1.6\ntyping_extensions==4.16.0  # why\n\nnvidia.nccl-cu12==2.21.5\n"

    assert parse_pins(text) == {"jinja2": "3.1.6", "typing-extensions": "4.16.0", "nvidia-nccl-cu12": "2.21.5"}


@pytest.mark.parametrize("pair", list_pairs())
def test_every_pair_pins_the_torch_in_its_name(pair: str) -> None:
    torch = read_pins(pair)["torch"]

    assert torch.rpartition(".")[0] == pair.partition("-")[2]


def test_pins_of_the_pair_come_before_those_of_the_development_environment() -> None:
    pins = read_pins("3.10-2.6")

    assert pins["numpy"].startswith("2.2.")
    assert pins["rich"] == read_pins("3.11-2.13")["rich"]


def test_an_environment_is_updated_when_the_project_names_other_packages() -> None:
    before, after = describe_wanted("3.10-2.6", b"test = []"), describe_wanted("3.10-2.6", b"test = ['safetensors']")

    assert before != after
    assert parse_pins(before) == parse_pins(after) == read_pins("3.10-2.6")


def test_a_package_without_a_pin_or_with_another_version_is_reported() -> None:
    installed = {"rich": "15.0.0", "numpy": "2.0.0", "new": "1.0"}

    assert find_not_pinned(installed, {"rich": "15.0.0", "numpy": "2.4.6"}) == ["numpy==2.0.0", "new==1.0"]


def test_a_build_of_the_pinned_version_is_pinned_and_another_build_is_not() -> None:
    assert find_not_pinned({"torch": "2.13.0+cpu"}, {"torch": "2.13.0"}) == []
    assert find_not_pinned({"torch": "2.13.0+cpu"}, {"torch": "2.13.0+cu126"}) == ["torch==2.13.0+cpu"]


def test_an_unknown_pair_is_refused_with_the_list_of_pairs() -> None:
    with pytest.raises(CannotBuild, match=r"^there is no pair '3\.1-2\.0'; the pairs are 3\.10-2\.6, "):
        read_pins("3.1-2.0")


def test_a_python_that_is_not_installed_is_refused_with_what_to_do() -> None:
    with pytest.raises(CannotBuild, match=r"^there is no Python 3\.99; install it, for example with `pyenv install"):
        find_interpreter("3.99")


def test_a_python_on_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    link = tmp_path / f"python{version}"
    link.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert find_interpreter(version) == str(link)


def test_environments_are_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_MATRIX", str(tmp_path))

    assert find_place() == tmp_path


def test_environments_are_outside_the_checkout_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_MATRIX", raising=False)

    assert find_place() == Path.home() / ".cache/holdfast-matrix"
