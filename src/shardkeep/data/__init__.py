"""Loaders whose position is a number. Its modules import torch; this page does not."""
