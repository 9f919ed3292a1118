"""Hypothesis strategies for meshes, specs, tensors, op calls, schedules."""
