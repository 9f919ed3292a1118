"""`lt.run` and `localtensor run`: programs and torchrun scripts on rank threads or real processes."""
