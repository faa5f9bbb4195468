"""The order of samples as a pure function of seed, epoch and position."""
