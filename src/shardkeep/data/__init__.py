"""Loaders whose position is a number."""
