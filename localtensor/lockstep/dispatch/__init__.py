"""One op on all ranks: op table, batching, execution, results."""
