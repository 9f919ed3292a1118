"""What a run does, as events: modules, calls, waits, ops, redistributions and memory of each rank, and their file formats."""
