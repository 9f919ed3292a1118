"""Rules: indexing, scatter, embedding, sorting."""
