"""Rules: attention, convolution, losses, normalization, pooling."""
