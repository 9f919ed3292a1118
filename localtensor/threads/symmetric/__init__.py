"""Symmetric memory on rank threads: buffers, handles, signals, streams, the ops of `torch.ops.symm_mem`, race detection.

order       happens-before: vector clocks of the ranks' streams, and what joins them
accesses    byte ranges of accesses to one buffer, and which two of them race
memory      buffers of the ranks, handles, barriers and signals
watch       the dispatch mode that reports each access of a rank
streams     stand-ins for torch.cuda's streams and events where there is no GPU
pools       the stand-in for torch.cuda's pool of symmetric memory there
meaning     what each op of torch.ops.symm_mem computes, as a pure function
kernels     the ops on rank threads
patches     what of torch is replaced while a simulation runs
"""
