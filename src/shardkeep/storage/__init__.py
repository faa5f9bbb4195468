"""Bytes: the `Store` protocol and its implementations. Knows no tensors and no ranks."""
