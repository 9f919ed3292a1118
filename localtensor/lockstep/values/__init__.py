"""LocalTensor and its storage: partition of ranks, stacked values, ints and random streams."""
