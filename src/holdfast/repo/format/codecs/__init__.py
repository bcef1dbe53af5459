"""How chunks are stored other than raw: encoded, or as the difference from another chunk."""
