"""The command `shardkeep`: looks at runs, checks, compares, prunes and rolls them back. Needs no torch."""
