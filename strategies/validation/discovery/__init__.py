"""Missing rules: search, inference of conditions, generated code."""
