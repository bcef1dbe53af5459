"""BLAKE3 digests of bytes in the memory of any device, computed there: the digests that name chunks."""
