"""When to save, what to keep, how to resume: policy only."""
