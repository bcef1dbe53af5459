"""Compiled graphs in a store: writing, finding, trusting, explaining misses, limiting the size."""
