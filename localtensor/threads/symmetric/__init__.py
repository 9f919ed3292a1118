"""Symmetric memory on rank threads: buffers, handles, signals, streams, the ops of `torch.ops.symm_mem`, race detection.

order       happens-before: vector clocks of the ranks' streams, and what joins them
accesses    byte ranges of accesses to one buffer, and which two of them race
memory      the buffers of the ranks, and what was exchanged of them
signals     signal pads, and the signals and barriers made of them
watch       the dispatch mode that reports each access of a rank
cuda        torch.cuda's streams, events and pool of symmetric memory where there is no GPU
handle      what one rank may do with the buffers of its group
kernels     the ops of torch.ops.symm_mem on rank threads, by name: `KERNELS`; an op that torch adds goes there
routing     those that move unequal numbers of rows, or blocks along two dims
patches     what of torch is replaced while a simulation runs
"""
