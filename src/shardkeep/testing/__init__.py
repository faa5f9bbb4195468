"""For tests, ours and those of others: the store contract, fakes and fault injection."""
