"""Search for races in the shared caches and in DTensor's propagator."""
