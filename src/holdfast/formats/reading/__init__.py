"""Reads checkpoints of other libraries: the format, the tree, and where the bytes of each tensor are."""
