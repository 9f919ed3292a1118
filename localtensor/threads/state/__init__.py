"""What is global in Python and torch, and swapped at each switch of ranks."""
