"""Compares two snapshots: which leaves were added, removed or changed, and by how much."""
