"""A framework that is not installed: the error says what to install."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from holdfast.integrations.frameworks import RequiredLibrary


def test_a_missing_library_is_named_with_the_command_that_installs_it() -> None:
    with (
        pytest.raises(ImportError, match=r"needs Some Library.*pip install 'holdfast\[some\]'"),
        RequiredLibrary("Some Library", "some"),
    ):
        import no_such_library_at_all  # type: ignore[import-not-found]  # noqa: F401


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), RequiredLibrary("Some Library", "some"):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("module", "library"),
    [
        ("transformers", "transformers"),
        ("transformers", "accelerate"),
        ("accelerate", "accelerate"),
        ("deepspeed", "deepspeed"),
        ("ray", "ray"),
        ("torchtitan", "torchtitan"),
    ],
)
def test_an_integration_without_its_library_names_the_extra(
    module: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Those parts of the library that other tests have imported, too.
    for name in [library, *(each for each in sys.modules if each.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"holdfast.integrations.{module}", raising=False)

    with pytest.raises(ImportError, match=rf"pip install 'holdfast\[{module}\]'"):
        importlib.import_module(f"holdfast.integrations.{module}")


def test_holdfast_itself_imports_no_framework() -> None:
    frameworks = ("transformers", "accelerate", "peft", "deepspeed", "ray", "torchtitan")
    code = f"import holdfast, sys; holdfast.open; print([name for name in {frameworks} if name in sys.modules])"

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"
