"""An open repository: its config, its identity, and what it remembers of packs."""
