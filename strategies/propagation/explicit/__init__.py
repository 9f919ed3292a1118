"""No communication that nobody wrote."""
