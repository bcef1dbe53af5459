"""Loading a tree of state into new memory."""
