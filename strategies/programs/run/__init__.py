"""Runs of one program by DTensor, simulated and on real processes, compared with the oracle."""
