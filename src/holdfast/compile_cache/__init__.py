"""Compiled graphs in a store: a key that says what was compiled, artifacts under it, and the backend that uses them."""
