"""Digests of Python functions and everything they read, and the search for user code in torch's tables."""
