"""Maintenance of a repository: check, repair, garbage collection, pruning, usage, and copying."""
