"""What the line of a rule means: book, local calls, checks."""
