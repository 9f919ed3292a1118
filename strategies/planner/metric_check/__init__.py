"""Whether a function of cost is a metric."""
