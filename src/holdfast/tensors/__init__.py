"""Tensors: their storages, their bytes and what describes them; the lowest layer that knows torch."""
