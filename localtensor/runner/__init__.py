"""`lt.run` and `localtensor run`: threads or processes, arguments of each rank, torchrun scripts."""
