"""Trees of state: walking, moving, packing and renaming what holds tensors."""
