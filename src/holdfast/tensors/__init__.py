"""Tensors: their storages, their bytes and their specs. The lowest layer that imports torch."""
