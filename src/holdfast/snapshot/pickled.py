"""The only place that pickles: values that nothing else can hold, and only where the user allows it on both sides."""

from __future__ import annotations

import pickle

from holdfast.errors import Corrupt, Unsupported


def pickle_value(value: object, *, name: str) -> bytes:
    """Pickle a value that was to be saved with `allow_pickle=True`."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # pickling runs the value's own code, which may raise anything
        raise Unsupported(f"{name or 'the tree'}: it cannot be pickled either: {error}") from error


def unpickle_value(data: bytearray, *, what: str) -> object:
    """Unpickle a value, which may run any code: the caller has been told so and allows it."""
    try:
        return pickle.loads(data)  # noqa: S301  # allow_pickle=True was passed
    except Exception as error:  # as above
        raise Corrupt(f"{what} was pickled and cannot be unpickled here: {error}", key=what) from error
