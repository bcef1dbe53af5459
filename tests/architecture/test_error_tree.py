"""The tree drawn at the top of errors.py is the tree that the classes form."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Final

from holdfast import errors

_DRAWN: Final = re.compile(r"^ {4}(?P<indent> *)(?P<name>[A-Z]\w+)(?: \((?P<builtins>[\w, ]+)\))?(?: {2,}\S.*)?$")


def find_violations(module: ModuleType | SimpleNamespace) -> list[str]:
    """Return a line for each class that is drawn wrongly, undocumented, or outside the tree."""
    classes = [value for value in vars(module).values() if _is_error(value)]
    real = {f"{cls.__name__} < {' '.join(base.__name__ for base in cls.__bases__)}" for cls in classes}
    drawn = set(_parse_drawing(module.__doc__ or ""))
    return [
        *(f"drawn, but not so: {line}" for line in sorted(drawn - real)),
        *(f"not drawn so: {line}" for line in sorted(real - drawn)),
        *(f"no docstring: {cls.__name__}" for cls in classes if not cls.__dict__.get("__doc__")),
        *_find_outsiders(classes),
    ]


def _is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def _find_outsiders(classes: Iterable[type]) -> list[str]:
    roots = [cls for cls in classes if cls.__name__ == "HoldfastError" and issubclass(cls, Exception)]
    return [f"not a HoldfastError: {cls.__name__}" for cls in classes if not issubclass(cls, tuple(roots))]


def _parse_drawing(text: str) -> list[str]:
    """Return `Name < Parent Builtin` for each drawn line, its parent being the last line indented less."""
    lines = []
    above: list[str] = []
    for match in filter(None, map(_DRAWN.match, text.splitlines())):
        depth = len(match["indent"]) // 2
        parent = above[depth - 1] if depth else "Exception"
        builtins = (match["builtins"] or "").replace(",", " ").split()
        lines.append(f"{match['name']} < {' '.join([parent, *builtins])}")
        above[depth:] = [match["name"]]
    return lines


def test_the_drawn_tree_is_the_real_one() -> None:
    assert find_violations(errors) == []


class HoldfastError(Exception):
    """The root of a planted tree."""


class Lost(HoldfastError, KeyError):
    """A planted leaf."""


class Bare(HoldfastError):
    __doc__ = None


class Stray(Exception):
    """Outside the tree."""


def _plant(drawing: str, *classes: type) -> SimpleNamespace:
    return SimpleNamespace(__doc__=drawing, **{cls.__name__: cls for cls in classes})


def test_a_planted_violation_is_reported() -> None:
    root = "    HoldfastError\n"
    right = _plant(root + "      Lost (KeyError)   gone: look elsewhere\n", HoldfastError, Lost)
    undrawn = _plant(root, HoldfastError, Lost)
    wrong_builtin = _plant(root + "      Lost (ValueError)   gone\n", HoldfastError, Lost)
    wrong_parent = _plant(root + "    Lost (KeyError)\n", HoldfastError, Lost)
    vanished = _plant(root + "      Lost (KeyError)\n      Gone\n", HoldfastError, Lost)
    undocumented = _plant(root + "      Bare\n", HoldfastError, Bare)
    stray = _plant(root + "    Stray\n", HoldfastError, Stray)

    assert find_violations(right) == []
    assert find_violations(undrawn) == ["not drawn so: Lost < HoldfastError KeyError"]
    assert find_violations(wrong_builtin) == [
        "drawn, but not so: Lost < HoldfastError ValueError",
        "not drawn so: Lost < HoldfastError KeyError",
    ]
    assert find_violations(wrong_parent)[0] == "drawn, but not so: Lost < Exception KeyError"
    assert find_violations(vanished) == ["drawn, but not so: Gone < HoldfastError"]
    assert find_violations(undocumented) == ["no docstring: Bare"]
    assert find_violations(stray) == ["not a HoldfastError: Stray"]
