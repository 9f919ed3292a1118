"""A parallel program compared with one device: does it compute the same, and where does it first go wrong?

watch        records what modules take and give, their gradients, the parameters and the loss, by qualified name
find_layout  which placement per mesh axis makes the ranks' tensors the one device's tensor
programs     runs both programs from equal parameters on the same global batch
divergence   the first difference in causal order, and what it looks like, in words
api          `compare`: the call, its result and its report
"""
