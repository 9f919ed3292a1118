"""Which overloads changed since a revision."""
