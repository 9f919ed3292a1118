"""A parallel program compared with one device: does it compute the same, and where does it first go wrong?

watch         records what modules take and give, their gradients, the parameters and the loss, by qualified name
find_layout   which placement per mesh axis makes the ranks' tensors the one device's tensor
programs      runs both programs from equal parameters on the same global batch; pipelines: a schedule in a model's place
divergence    the first difference in causal order; explain: what it looks like, in words
op_stream     the ops of the region in which it lies, in a second run; setup_lines: who made the module parallel
suspects      the calls that read what one device has and give what it has not; op_values: what of one device a value is
comparison    the result, as text, JSON and HTML
scripts       two torchrun scripts; script_watch: what one of them computes, unchanged
api           `compare`: the call

Beside this folder: compare_dropout (the draws of a dropout), compare_lockstep (`on="lockstep"`), compare_script (the torchrun script
of a divergence), compare_shrink (a smaller program that shows it), compare_tolerance (how far a right value may be away).
"""
