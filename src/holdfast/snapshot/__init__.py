"""Snapshots of trees: saving, loading, looking into them, and telling two apart."""
