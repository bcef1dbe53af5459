"""Compiles, saves and loads graphs with private names of torch's compiler; each `torch_*` module says what differs."""
