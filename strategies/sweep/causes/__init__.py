"""Findings by cause: which function of torch is wrong, found by replacing it."""
