"""What a tensor is, without its bytes: dtypes, chunks, layouts. Pure: no torch, no files."""
