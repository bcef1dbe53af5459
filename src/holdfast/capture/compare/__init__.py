"""Compare runs: which events differ, and where the difference began."""
