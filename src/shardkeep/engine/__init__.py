"""The only place where plan, state, storage and ranks meet: one save, one restore, one prune."""
