"""Decisions as pure functions over frozen values: no torch, files, clock or random."""
