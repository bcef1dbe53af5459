"""Object stores: keys to bytes, and nothing about what the bytes mean."""
