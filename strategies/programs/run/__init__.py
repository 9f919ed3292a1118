"""One program by DTensor, simulated and on real processes, beside the oracle."""
