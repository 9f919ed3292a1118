"""Other calls and values made from one call."""
