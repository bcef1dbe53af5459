"""Recording a run while it trains."""
