"""The gate before a merge: baseline, decision, budget."""
