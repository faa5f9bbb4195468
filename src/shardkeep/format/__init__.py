"""Every byte and name on disk. Pure: bytes in, values out; no files, no torch."""
