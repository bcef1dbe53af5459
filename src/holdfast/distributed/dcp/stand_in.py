"""Classes that stand in for classes of torch: used when they are called, never when they are inherited from."""

from __future__ import annotations

import copyreg
import sys
import types
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from typing import Any, Final

_PACKAGE: Final = "torch.distributed.checkpoint"
"""The package whose modules get the stand-ins under the names of torch's classes."""


class StandIn(ABCMeta):
    """The metaclass of a class that takes the place of a class of torch while `is_installed` is set.

    A call makes an instance of the stand-in while it is installed, else of torch's class. A subclass always inherits
    from torch's class: it may override or use what only that has. Instances of torch's class, and of its subclasses,
    count as instances of the stand-in, as they do without it.
    """

    torch_class: Any
    is_installed: bool

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, torch_class: Any = None, **kwargs: Any
    ) -> Any:
        """Make a stand-in for `torch_class`; without one, a subclass of the torch classes behind the bases."""
        if torch_class is None:
            real = tuple(base.torch_class if isinstance(base, StandIn) else base for base in bases)
            return types.new_class(name, real, kwargs, lambda body: body.update(namespace))
        made: Any = super().__new__(cls, name, bases, namespace, **kwargs)
        made.torch_class = torch_class
        made.is_installed = False
        return made

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> None:
        """Do nothing more: `__new__` has used the keyword arguments."""
        super().__init__(name, bases, namespace)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance: of the stand-in while it is installed, of torch's class before and after."""
        if not cls.is_installed:
            return cls.torch_class(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        """Tell whether it is an instance of the stand-in or of torch's class."""
        return isinstance(instance, cls.torch_class) or super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Tell whether it is the stand-in, or a subclass of torch's class."""
        return issubclass(subclass, cls.torch_class) or super().__subclasscheck__(subclass)


def put_in(stand_ins: Sequence[StandIn]) -> None:
    """Let the names of torch's classes mean the stand-ins, in all modules of torch's package that are loaded.

    A module that is loaded later imports the names from these.
    """
    for each in stand_ins:
        for module in _iter_holders(each.torch_class.__name__, each.torch_class):
            setattr(module, each.torch_class.__name__, each)
        # Instances of torch's class are pickled by its name, which means the stand-in now.
        copyreg.pickle(each.torch_class, _Reducer(each))
        each.is_installed = True


def take_out(stand_ins: Sequence[StandIn]) -> None:
    """Let the names mean torch's classes again, also in modules that were loaded meanwhile."""
    for each in stand_ins:
        for module in _iter_holders(each.torch_class.__name__, each):
            setattr(module, each.torch_class.__name__, each.torch_class)
        copyreg.dispatch_table.pop(each.torch_class, None)
        each.is_installed = False


def _iter_holders(name: str, value: object) -> Iterator[types.ModuleType]:
    """Yield the modules of torch's package in which `name` means `value`."""
    for key, module in list(sys.modules.items()):
        is_inside = key == _PACKAGE or key.startswith(f"{_PACKAGE}.")
        # An import that was forbidden leaves None, which has no such name either.
        if is_inside and getattr(module, name, None) is value:
            yield module


class _Reducer:
    """Pickles instances of a class of torch by its stand-in, which any process can import."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    def __call__(self, instance: object) -> tuple[Any, ...]:
        return _make_own, (self._stand_in,), instance.__getstate__()


def _make_own(stand_in: StandIn) -> object:
    """Return an instance of torch's class whose state is still to be set."""
    made: object = object.__new__(stand_in.torch_class)
    return made
