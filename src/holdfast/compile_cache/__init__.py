"""The compile cache: keys of graphs, compiled artifacts in a store, and the `torch.compile` backend that uses them."""
