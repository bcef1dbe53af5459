"""Old module paths still import, and say where the module is now."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from holdfast.moved import MOVED


@pytest.mark.parametrize("step", [1, -1])
def test_an_old_path_gives_the_module_that_replaced_it(step: int) -> None:
    # In both orders: a package is imported before its modules, and after them.
    program = (
        "import importlib, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        f"for old_name, new_name in {[*MOVED.items()][::step]!r}:\n"
        "    old, new = importlib.import_module(old_name), importlib.import_module(new_name)\n"
        "    assert old is new and old.__name__ == old.__spec__.name == new_name, old_name\n"
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
