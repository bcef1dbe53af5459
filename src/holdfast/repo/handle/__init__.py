"""An open repository: its config, its identity, its index, and which stored chunks it has verified."""
