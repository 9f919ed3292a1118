"""Sources of claims: what a source is, the functions that it speaks about, and those that are known by name."""
