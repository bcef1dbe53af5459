"""The arguments of a call as a saved state, so that the call can be run again on another device or in another dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from holdfast.errors import Mismatch
from holdfast.trees.apply import cast_floating, pack_kwargs, to_kwargs, unpack_kwargs

Result = TypeVar("Result")


class Call:
    """The arguments of one call: save them beside a module, and run the call again later.

    `Call(batch, mask=mask)` keeps references to the arguments. `Call()` is empty, for `load_into` to fill.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Keep references to the arguments; nothing is copied."""
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        """Show the number of arguments, not their values."""
        return f"<Call of {len(self.args)} by position, {len(self.kwargs)} by keyword>"

    def run(
        self,
        function: Callable[..., Result],
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Result:
        """Call a function or module with the arguments, moved to `device` and cast to the floating `dtype` if given."""
        args, kwargs = cast_floating((self.args, self.kwargs), dtype)
        if device is not None:
            moved_args, moved_kwargs = to_kwargs(args, kwargs, device)
            # Without arguments there is nothing to move.
            args, kwargs = (moved_args[0], moved_kwargs[0]) if moved_args else ((), {})
        return function(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the arguments as a tree that can be saved."""
        values, keys = pack_kwargs(*self.args, **self.kwargs)
        return {"values": list(values), "keys": list(keys)}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Replace the arguments by saved ones; raises Mismatch if the state has none."""
        try:
            values, keys = state_dict["values"], state_dict["keys"]
        except (KeyError, TypeError) as error:
            raise Mismatch(f"this is not the state of a Call: {error!r}") from error
        self.args, self.kwargs = unpack_kwargs(values, keys)
