"""Sharded tensors: which boxes of a global tensor a rank has."""
