"""Overlays: DTensor's own dispatch under our rules."""
