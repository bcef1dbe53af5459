"""Find snapshots: expressions over metadata and metrics, globs, lineage, and the first bad one of a series."""
