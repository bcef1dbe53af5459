"""Marks for tests of what differs between versions of torch."""

from __future__ import annotations

import pytest
import torch

RELEASE = ".".join(torch.__version__.split(".")[:2])
"""The version of the installed torch, such as "2.13"."""


def only_with_torch(version: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test unless this version of torch is installed."""
    return pytest.mark.skipif(version != RELEASE, reason=f"tests torch {version}, and torch {RELEASE} is installed")
