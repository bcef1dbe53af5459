"""Loading into existing tensors, modules and optimizers."""
