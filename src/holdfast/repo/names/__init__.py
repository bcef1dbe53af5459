"""Names and their records: generations, snapshots, tags, leases, marks, and what they keep alive."""
