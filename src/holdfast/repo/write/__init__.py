"""Writes snapshots: sources to chunks, chunks to packs, and the commit."""
