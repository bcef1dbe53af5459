"""Telling two snapshots apart: which leaves were added, removed or changed, and by how much."""
