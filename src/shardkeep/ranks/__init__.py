"""Peers: the `Group` protocol and its implementations. Knows no bytes on disk and no tensors."""
