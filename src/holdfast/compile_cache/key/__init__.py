"""Computes the key of a graph: a digest of everything that can change the compiled code."""
