"""What Python code does: the digest of functions, and user code in torch's tables."""
