"""Finds what the tests of one file leave behind in the process and would mislead those of the next file."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, Final

GROUP_VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets: a framework that finds these opens a process group."""


def read_group_variables() -> dict[str, str]:
    """Return those variables of a process group that are set."""
    return {name: os.environ[name] for name in GROUP_VARIABLES if name in os.environ}


Handlers = dict[signal.Signals, Any]


def read_handlers() -> Handlers:
    """Return the handlers of the signals that end a training run."""
    return {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}


def restore_handlers(before: Handlers) -> list[str]:
    """Restore handlers; return which had been replaced."""
    found = [f"a handler of {each.name}" for each, handler in before.items() if signal.getsignal(each) is not handler]
    for each, handler in before.items():
        signal.signal(each, handler)
    return found


def remove_leftovers(before: Mapping[str, str]) -> list[str]:
    """Close the process group and restore the variables; return what had been left."""
    found = []
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        found.append("a process group")
    after = read_group_variables()
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            found.append(f"the variable {name}={after.get(name)!r}")
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})
    return found
