"""The key of a compiled graph: everything that can change the compiled code."""
