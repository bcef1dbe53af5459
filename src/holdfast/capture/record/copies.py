"""Keeps the hooks of a recording out of copies of the model, such as a moving average of its weights."""

from __future__ import annotations

from typing import Any, Final

import torch

_HOOKS: Final = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


class CopiedHook:
    """Takes the place of a module's hooks in a copy of the module. It does nothing, and is removed from the copy."""

    _hooks: Final = None

    def __init__(self, module: torch.nn.Module, memo: dict[Any, Any]) -> None:
        """Be removed from the copy of `module` when `memo`, that of `copy.deepcopy`, is deleted after the copying."""
        copied = memo.get(id(module))
        if copied is not None:
            memo.setdefault(_CopiedModules, _CopiedModules()).modules.append(copied)


class _CopiedModules:
    """The modules of a copy from which hooks are to be removed."""

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []

    def __del__(self) -> None:
        """Remove the hooks; any that are left do nothing."""
        for module in self.modules:
            hooks = [vars(module).get(name, {}) for name in _HOOKS]
            copied = [key for each in hooks for key, hook in each.items() if _is_copied(hook)]
            for key in copied:
                for each in hooks:
                    each.pop(key, None)


def _is_copied(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), CopiedHook)
