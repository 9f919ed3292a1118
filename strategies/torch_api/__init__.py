"""DTensor's private parts, behind an interface of our own: rule registries, propagation, redistribution, specs, caches."""
