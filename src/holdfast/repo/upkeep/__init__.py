"""Upkeep: check, repair, collection, pruning, usage, and copies to other repositories."""
