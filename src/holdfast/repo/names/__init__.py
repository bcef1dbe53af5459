"""Names and their records: generations, snapshots, tags, leases and marks, and which files they keep alive."""
