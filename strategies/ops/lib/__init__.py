"""What families of rules share."""
