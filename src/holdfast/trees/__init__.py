"""Trees of state (nested containers of tensors and values): walking, moving, encoding and renaming them."""
