"""Stand-ins for classes of torch: calling one creates its own instance, subclassing one subclasses torch's class."""

from __future__ import annotations

import copyreg
import sys
import types
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from typing import Any, Final

_PACKAGE: Final = "torch.distributed.checkpoint"
"""The package in whose modules stand-ins replace torch's classes."""


class StandIn(ABCMeta):
    """The metaclass of a class that replaces a class of torch while `is_installed` is set.

    A call creates an instance of the stand-in while it is installed, else of torch's class. A subclass always inherits
    from torch's class, whose internals it may use or override. Instances of torch's class and of its subclasses count
    as instances of the stand-in, so that isinstance checks work as before.
    """

    torch_class: Any
    is_installed: bool

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, torch_class: Any = None, **kwargs: Any
    ) -> Any:
        """Create a stand-in for `torch_class`; without it, a subclass of the classes that the bases stand in for."""
        if torch_class is None:
            torch_bases = tuple(base.torch_class if isinstance(base, StandIn) else base for base in bases)
            return types.new_class(name, torch_bases, kwargs, lambda body: body.update(namespace))
        made: Any = super().__new__(cls, name, bases, namespace, **kwargs)
        made.torch_class = torch_class
        made.is_installed = False
        return made

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> None:
        """Drop the keyword arguments, which `__new__` has used."""
        super().__init__(name, bases, namespace)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an instance: of the stand-in while it is installed, else of torch's class."""
        if not cls.is_installed:
            return cls.torch_class(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether it is an instance of the stand-in or of torch's class."""
        return isinstance(instance, cls.torch_class) or super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Return whether it is the stand-in, or a subclass of torch's class."""
        return issubclass(subclass, cls.torch_class) or super().__subclasscheck__(subclass)


def put_in(stand_ins: Sequence[StandIn]) -> None:
    """Replace torch's classes by the stand-ins in all loaded modules of torch's package.

    Modules that are loaded later import the stand-ins from these.
    """
    for each in stand_ins:
        for module in _iter_modules(each.torch_class.__name__, each.torch_class):
            setattr(module, each.torch_class.__name__, each)
        # Pickle finds torch's class by its name, which now refers to the stand-in.
        copyreg.pickle(each.torch_class, _Reducer(each))
        each.is_installed = True


def take_out(stand_ins: Sequence[StandIn]) -> None:
    """Restore torch's classes in all loaded modules of torch's package."""
    for each in stand_ins:
        for module in _iter_modules(each.torch_class.__name__, each):
            setattr(module, each.torch_class.__name__, each.torch_class)
        copyreg.dispatch_table.pop(each.torch_class, None)
        each.is_installed = False


def _iter_modules(name: str, value: object) -> Iterator[types.ModuleType]:
    """Yield the modules of torch's package whose attribute `name` is `value`."""
    for key, module in list(sys.modules.items()):
        is_inside = key == _PACKAGE or key.startswith(f"{_PACKAGE}.")
        # A blocked import leaves None in sys.modules; it does not have the attribute either.
        if is_inside and getattr(module, name, None) is value:
            yield module


class _Reducer:
    """Pickles instances of torch's class through the stand-in, which any process can import."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    def __call__(self, instance: object) -> tuple[Any, ...]:
        return _new_torch_instance, (self._stand_in,), instance.__getstate__()


def _new_torch_instance(stand_in: StandIn) -> object:
    """Return an instance of torch's class without state; unpickling sets it afterwards."""
    made: object = object.__new__(stand_in.torch_class)
    return made
