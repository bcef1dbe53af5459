"""Saving a tree of state, in the foreground or in the background."""
