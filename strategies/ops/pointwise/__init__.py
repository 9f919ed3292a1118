"""Rules: elementwise, linear, creation, optimizers."""
