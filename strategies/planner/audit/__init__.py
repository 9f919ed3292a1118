"""DTensor's own redistributions on trial."""
