"""Series of snapshots: publish versions of a tree, and follow them as they are committed."""
