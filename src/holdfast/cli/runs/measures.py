"""Formats the difference between two tensors as one line of text."""

from __future__ import annotations

from holdfast.capture.compare.measure import TensorDistance


def format_measure(measure: TensorDistance) -> str:
    """Return the difference between two tensors as one line."""
    found = [f"rel {measure.relative_l2:.3g}"] if measure.relative_l2 is not None else []
    if measure.max_abs is not None:
        at = f" at {measure.at}: {_pair_values(measure)}" if measure.at is not None else ""
        found.append(f"max abs {measure.max_abs:.3g}{at}")
    found += [f"cos {measure.cosine:.9g}"] if measure.cosine is not None else []
    found += [f"ulp {measure.max_ulp}"] if measure.max_ulp is not None else []
    found += [f"{measure.percent:.3g} % over the tolerance"] if measure.percent is not None else []
    for name, (before, after) in (("NaN", measure.nan), ("Inf", measure.inf)):
        if before or after:
            found.append(f"{name} {before} -> {after}")
    found += [measure.note] if measure.note else []
    return "  ".join(found) or "size of the difference unknown: record with level='full'"


def _pair_values(measure: TensorDistance) -> str:
    return " against ".join(f"{value:.9g}" for value in measure.values or ())
