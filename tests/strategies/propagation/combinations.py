"""All combinations of lines on a mesh, found by brute force."""

from strategies.propagation.mesh_expansion import _Search, _start


def every_combination(problem):
    """Every combination that is right, in no order: up to lines ** axes of them."""
    search, stack = _Search(problem, 0), [_start(problem)]
    while stack:
        beginning = stack.pop()
        if len(beginning.lines) == len(problem.sizes):
            yield beginning
        else:
            stack += search.continued(beginning)
