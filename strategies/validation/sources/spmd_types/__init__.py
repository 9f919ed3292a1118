"""The library `spmd_types` as a source: its op table, its collectives, and the hooks of autograd Functions."""
