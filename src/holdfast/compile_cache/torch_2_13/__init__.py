"""What the cache uses of torch 2.13 by private names."""
