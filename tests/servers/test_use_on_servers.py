"""A round of what a user does, through the public interface and the command line, on every server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli.main import main
from holdfast.repo.upkeep.collect import Rules
from tests.servers.conftest import PlaceOf
from tests.servers.places import QUICK_SERVERS, REAL_SERVERS, make_prefix

SERVERS = [name for name in QUICK_SERVERS if name != "small S3"]
"""Every verb is tested on the small S3 server elsewhere."""


@pytest.fixture(params=[*SERVERS, *(pytest.param(name, marks=pytest.mark.slow) for name in REAL_SERVERS)])
def url(request: pytest.FixtureRequest, place_of: PlaceOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a store that does not exist yet; the environment has what it takes to reach its server."""
    place = place_of(request.param)
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    return place.url(make_prefix(tmp_path))


def make_state(step: int) -> dict[str, object]:
    model = torch.nn.Linear(64, 64)
    return {"model": model.state_dict(), "big": torch.full((300_000,), float(step)), "step": step}


def find_problems(store: holdfast.Store) -> list[str]:
    return [str(finding) for finding in store.check(read=True) if finding.severity != "note"]


def test_what_is_saved_is_loaded_listed_tagged_pruned_and_collected(url: str) -> None:
    states = {f"run/{step}": make_state(step) for step in range(3)}
    store = holdfast.open(url)
    for name, state in states.items():
        store.save(name, state)
    store.tag("best", "run/1")

    reader = holdfast.open(url, read_only=True)

    for name, state in states.items():
        assert_same(reader.load(name), state)
    assert_same(reader.load("best"), states["run/1"])
    latest = reader.latest("run/")
    assert latest is not None
    assert latest.name == "run/2"
    assert [snapshot.name for snapshot in reader.snapshots("run/")] == list(states)
    store.prune("run/", keep_last=1)
    store.gc(Rules(min_age_s=0.0))
    assert [snapshot.name for snapshot in reader.snapshots()] == ["run/1", "run/2"]
    assert_same(holdfast.open(url).load("run/2"), states["run/2"])
    assert find_problems(store) == []


def test_a_repeated_save_adds_no_bytes_and_load_into_fills_a_target(url: str) -> None:
    state = {"weight": torch.arange(500_000, dtype=torch.float32)}
    holdfast.open(url).save("first", state)

    saved = holdfast.open(url).save("second", state)

    target = {"weight": torch.zeros(500_000)}
    holdfast.open(url).load_into("second", target)
    assert torch.equal(target["weight"], state["weight"])
    assert saved.new_bytes == 0


def test_the_command_line_puts_gets_copies_and_checks(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/config.json").write_text('{"lr": 1}')
    (tmp_path / "in/weights.bin").write_bytes(bytes(range(256)) * 5_000)

    run(url, "init")
    run(url, "put", "files", str(tmp_path / "in"))
    run(url, "tag", "best", "files")
    run(url, "get", "best", str(tmp_path / "out"))
    run(url, "check", "--read")
    run(url, "gc", "--yes")
    run(url, "copy", "files", "--to", str(tmp_path / "local"))
    run(str(tmp_path / "local"), "copy", "files", "--to", f"{url}-again")
    run(f"{url}-again", "get", "files", str(tmp_path / "back"))

    for folder in ("out", "back"):
        assert (tmp_path / folder / "in/config.json").read_text() == '{"lr": 1}'
        assert (tmp_path / folder / "in/weights.bin").read_bytes() == bytes(range(256)) * 5_000
    capsys.readouterr()
    run(url, "ls")
    assert "files" in capsys.readouterr().out


def run(store: str, *words: str) -> None:
    assert main(["-s", store, *words]) == 0, words


def assert_same(found: object, expected: object) -> None:
    assert isinstance(found, dict)
    assert isinstance(expected, dict)
    assert found["step"] == expected["step"]
    assert torch.equal(found["big"], expected["big"])
    assert found["model"].keys() == expected["model"].keys()
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor)
