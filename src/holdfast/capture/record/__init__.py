"""Record a run while it trains."""
