"""Implements the content store: batches of tensors, a catalog of their names, and tensors rebuilt from them."""
