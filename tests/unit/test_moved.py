"""Old module paths still import, and say where the module is now."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from holdfast.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_gives_the_module_that_replaced_it(old: str) -> None:
    program = (
        "import importlib, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        f"old, new = importlib.import_module({old!r}), importlib.import_module({MOVED[old]!r})\n"
        f"assert old is new and old.__name__ == old.__spec__.name == {MOVED[old]!r}\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_old_path_warns_and_names_the_new_one() -> None:
    program = "from holdfast.store.protocol import ObjectStore"

    run = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", program], capture_output=True, text=True, check=False
    )

    assert "DeprecationWarning: holdfast.store has moved: import holdfast.objects instead" in run.stderr


def test_what_never_existed_is_still_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "holdfast.store", raising=False)

    with pytest.warns(DeprecationWarning, match="holdfast.objects"):  # the package itself has moved
        import_module("holdfast.store")
    with pytest.raises(ModuleNotFoundError, match=r"holdfast\.store\.nothing"):
        import_module("holdfast.store.nothing")
