"""A journal as text, JSON, HTML."""
