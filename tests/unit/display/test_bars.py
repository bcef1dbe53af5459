"""`progress=True` draws a bar with what is installed: tqdm, otherwise rich, otherwise nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.display.bars import RichBar, TqdmBar, make_bar, make_progress
from holdfast.progress import CallbackProgress, Silent


def block(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make packages look as if they were not installed."""
    for package in packages:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)


def test_a_choice_is_a_bar_a_function_a_progress_or_nothing() -> None:
    silent = Silent()

    assert make_progress(None) is None
    assert make_progress(False) is None
    assert make_progress(silent) is silent
    assert isinstance(make_progress(print), CallbackProgress)
    assert make_progress(True) is not None


def test_tqdm_draws_the_bar_where_it_is_installed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    store = holdfast.open(tmp_path / "ckpts")
    store.save("run/1", {"w": torch.arange(1 << 20)}, progress=True)

    store.load("run/1", progress=True)

    out, err = capfd.readouterr()
    assert out == ""
    assert "save run/1: 100%" in err
    assert "load run/1: 100%" in err
    assert "8.00M/8.00M" in err


def test_rich_draws_it_where_tqdm_is_not(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    block(monkeypatch, "tqdm")
    bar = make_bar()

    bar.begin("save [bold]run/1", 8 << 20)
    bar.advance(8 << 20)
    bar.end()

    assert isinstance(bar, RichBar)
    assert "save [bold]run/1" in capfd.readouterr().out


def test_nothing_is_drawn_where_neither_is(monkeypatch: pytest.MonkeyPatch) -> None:
    block(monkeypatch, "tqdm", "rich")

    assert isinstance(make_bar(), Silent)


@pytest.mark.parametrize("bar_class", [TqdmBar, RichBar])
def test_a_bar_takes_more_bytes_than_expected_and_calls_without_a_task(
    bar_class: type[TqdmBar] | type[RichBar], capfd: pytest.CaptureFixture[str]
) -> None:
    if bar_class is TqdmBar:
        pytest.importorskip("tqdm")
    bar = bar_class()

    bar.advance(1)
    bar.begin("one", 10)
    bar.begin("two", 10)
    bar.advance(25)
    bar.end()
    bar.end()

    assert "two" in "".join(capfd.readouterr())
