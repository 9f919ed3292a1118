"""Files, journal, worker pool, signals, terminal, git.  Knows nothing of sharding."""
