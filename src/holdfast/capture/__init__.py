"""Recording what flows through a model, and finding where two recordings part."""
