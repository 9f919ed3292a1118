"""Rules: views, reshapes, slices, joining, padding."""
