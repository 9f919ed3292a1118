"""Rules: products of matrices, batched linear algebra, distances, FFT."""
