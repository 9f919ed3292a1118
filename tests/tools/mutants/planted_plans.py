"""Bugs planted by hand: planner, prices, plans carried out, rules of our own."""

from __future__ import annotations

from tests.tools.mutants.values import Planted, bug

_OPTIMAL = "tests/strategies/planner/search/test_api_optimal.py"
_BOUND = "tests/strategies/planner/search/test_edges.py"
_PLANNER = "tests/strategies/planner/search/test_api.py"
_PRICING = "tests/strategies/planner/steps/test_prices.py"
_LOCKSTEP = "tests/strategies/planner/execute/test_lockstep.py"

_SEARCHED: tuple[Planted, ...] = (
    bug("strategies/planner/search/plan_cache::AStarSearch.cheapest", "if cost < best.get(there, INF):", "if there not in best:",
            "the way that is found first is kept, and not the cheapest", _OPTIMAL),
    bug("strategies/planner/search/plan_cache::AStarSearch.leanest", "more = max(most, edge_memory(self.table,", "more = most + (edge_memory(self.table,",
            "the leanest plan is said to need the memory of all its steps together", _PLANNER),
    bug("strategies/planner/search/plan_cache::AStarSearch._found", "others = [more + at(its) for", "others = [more for",
            "the sentence of why says that another first step would cost less than it does", _PLANNER),
    bug("strategies/planner/search/edges::AdmissibleHeuristic.at", "else self._reached - self._source_bound(values) if", "else self._reached if",
            "on three axes the bound is above the price, and a dearer plan is called the cheapest", _BOUND),
    bug("strategies/planner/search/edges::AdmissibleHeuristic.value", "if self.goal[i] == (p, turn) and beneath == DONE:", "if self.goal[i] == (p, turn):",
            "a cut over one that must still go is taken for done", _BOUND),
    bug("strategies/planner/search/edges::LegalEdges.of", "if d >= 0 and here.order[d][-1] != i:", "if d >= 0 and here.order[d][0] != i:",
            "a plan undoes the outermost cut first: wrong rows", _BOUND),
    bug("strategies/planner/search/edges::LegalEdges.of", "turn = len(here.order[e]) - (d == e)\n", "turn = len(here.order[e])\n",
            "a shard that changes its kind on its dim gets a turn too high", _BOUND),
    bug("strategies/planner/search/edges::LegalEdges._flattened_step", "if d == e else 0) if e >= 0 else 0\n        beneath = values >> width *",
            "if d == e else 0) if e >= 0 else 0\n        beneath = values ^ width *",
            "a step along several axes does not know what is done beneath it", _BOUND),
    bug("strategies/planner/search/edges::LegalEdges._flattened_steps", "if table.dims[q] != d or order != stack:", "if table.dims[q] != d and order != stack:",
            "flattened axes cannot cut the same dim in another order", _BOUND),
    bug("strategies/planner/search/state_table::StepKind.__init__", "self.multiple = ranks * itemsize if self.exchanged and not scatters else 0", "self.multiple = 0",
            "an exchanged all-reduce is priced without what its equal parts add", _BOUND),
    bug("strategies/planner/search/state_table::PlacementTable._follows", "why_not_made(reduction, dtype, self.dims[p] >= 0)", "why_not_made(reduction, dtype, False)",
            "a shard becomes a part of an average: values come out divided", _BOUND),
    bug("strategies/planner/search/plan_cache::PlanCache.get", "value_key(topology), memory, flattened\n", "value_key(topology), flattened\n",
            "a plan that was made without a limit is given where a limit forbids it", _PLANNER),
    bug("strategies/planner/search/plan_cache::PlanCache.clear", "self.same, self._tables = {}, {}", "self._tables = {}",
            "clear() leaves plans that were asked for by the same objects", _PLANNER),
    bug("strategies/planner/search/plan_cache::PlanCache.table", "tuple(map(tuple, axes)), by\n", "tuple(map(tuple, axes)), None\n",
            "who plans by bytes is given the costs of who planned by time", _PLANNER),
    bug("strategies/planner/search/api::_check", "(src.mesh, src.shape, src.dtype) != (dst.mesh, dst.shape, dst.dtype)",
            "(src.mesh, src.shape) != (dst.mesh, dst.shape)", "a plan from f32 to i64, which no step makes", _PLANNER),
    bug("strategies/planner/search/api::_search", 'f"Allow {need} bytes, or more."', 'f"Allow {bytes_text(need)}, or more."',
            "who allows what the refusal asks for is refused again: it was rounded down", _PLANNER),
    bug("strategies/planner/search/api::_with_other_first_step", "< found.price) and all(later.now", "< found.price) or all(later.now",
            "another beginning is told that is not the cheapest, or that comes back to where it began"),
)  # fmt: skip

_PRICED: tuple[Planted, ...] = (
    bug("strategies/planner/steps/prices::bytes_sent", "TRIPS[move.kind] * -(-move.nbytes * (move.ranks - 1) // move.ranks)",
            "TRIPS[move.kind] * (move.nbytes * (move.ranks - 1) // move.ranks)", "bytes sent are rounded down, twice in an all-reduce", _PRICING),
    bug("strategies/planner/steps/prices::peak_memory", "return 2 * before + move.nbytes + after", "return before + move.nbytes + after",
            "an all-gather within --memory runs out of memory", _PRICING),
    bug("strategies/planner/steps/prices::Topology.link", "max(link.per_byte for link in links)", "min(link.per_byte for link in links)",
            "a group over two nodes is priced by the link within one", _PRICING),
    bug("strategies/planner/steps/prices::Topology.link", "[self.links[axis] if axis < len(self.links) else NETWORK for axis in axes]",
            "[self.links[axis] for axis in axes]", "a topology of fewer links than axes ends in an IndexError", _PRICING),
    bug("strategies/planner/steps/legal_steps::with_placement", "orders[cut[0]] += tuple(axes)", "orders[cut[0]] = tuple(axes) + orders[cut[0]]",
            "a new cut is the outermost: ranks hold each other's rows"),
    bug("strategies/planner/steps/legal_steps::why_not_made", 'if reduction == "avg" and cut:', 'if reduction == "avg" and not cut:',
            "shards become parts of averages, and whole values do not"),
    bug("strategies/planner/steps/legal_steps::_innermost", "if other == axis or spec.mesh.sizes[other] > 1][-1]", "][-1]",
            "an axis of one rank stands in everybody's way"),
    bug("strategies/planner/steps/topology::Cluster._link", "block = math.prod(mesh.sizes[axis:])", "block = math.prod(mesh.sizes[axis + 1 :])",
            "groups that reach over two nodes are priced as within one"),
    bug("strategies/planner/steps/prices::TorchPrice._ring", "hops = trips * (move.ranks - 1)", "hops = trips * move.ranks",
            "torch's own cost is another one, and `--by torch` plans by it"),
    bug("strategies/planner/text/options::parse_bytes", "(1024 if found[3] else 1000)", "(1000 if found[3] else 1024)", "GiB and GB change places"),
    bug("strategies/planner/text/parser::_shard_order", "tuple(axes[turns.index(turn)] for turn in range(len(axes)))", "tuple(axes[turn] for turn in turns)",
            "of three axes on one dim, S(0)[1],S(0)[2],S(0)[0] is read the other way round"),
)  # fmt: skip

_CARRIED_OUT: tuple[Planted, ...] = (
    bug("strategies/planner/execute/rows::rows_after_cuts", "*before, (factor, ranks, place) = cut", "(factor, ranks, place), *before = cut",
            "nested cuts are made inside out", "strategies/planner/execute/rows.py", "tests/strategies/planner/execute/test_rows.py"),
    bug("strategies/planner/execute/rows::are_in_memory_order", "return end == shape[dim] and math.prod(shape[:dim]) == 1", "return end == shape[dim]",
            "columns are sent as they lie in memory: elements change places", "strategies/planner/execute/rows.py"),
    bug("strategies/planner/execute/step::_exchange_and_reduce", "[sent[me]] * count", "[sent[0]] * count",
            "an uneven minimum of floats asks its peers for more than they send", _LOCKSTEP),
    bug("strategies/planner/execute/step::_local", 'todo.pending in ("min", "max", "avg")', 'todo.pending in ("min", "max")',
            "R to P(avg) divides the value", _LOCKSTEP),
    bug("strategies/planner/execute/step::_all_reduce", "total = x if ours else _copy(x)", "total = x",
            "an all-reduce writes into the tensor that the user passed", "tests/strategies/planner/execute/test_process_groups.py"),
    bug("strategies/planner/execute/process_groups::_by_world_rank", "return tuple(sorted(line, key=ranks.__getitem__))", "return tuple(line)",
            "a mesh of other rank numbers gets its pieces in another order", "tests/strategies/planner/execute/test_process_groups.py"),
    bug("strategies/planner/execute/process_groups::_ranks_of_all_meshes", "return [list(one) for one in dict.fromkeys(map(tuple, ranks_by_rank))]", "return [ranks]",
            "slices of a larger mesh make groups that their peers do not make: they wait for ever", "tests/strategies/planner/execute/test_process_groups.py"),
    bug("strategies/planner/execute/lockstep::_uneven_step", "key: Hashable = (todo, tuple(rows[rank] for rank in members))", "key: Hashable = todo",
            "all groups get what the first one got", _LOCKSTEP),
    bug("strategies/planner/execute/lockstep::_has_even_pieces", "if size % ranks_along(spec.mesh.sizes, stack) or mine != tuple(sorted(mine)):",
            "if size % ranks_along(spec.mesh.sizes, stack):", "flattened axes that cut from right to left are gathered in the wrong order", _LOCKSTEP),
)  # fmt: skip

_THEIRS: tuple[Planted, ...] = (
    bug("strategies/torch_api/redistribute_plans::_transform_infos", "if isinstance(error, TypeError) and _is_raised_here(error):\n            raise\n", "",
            "a torch that is asked in another way seems to refuse every redistribution"),
    bug("strategies/planner/audit/pairs::dtensor_price", "sum(price(step.move) for step in steps if _has_ranks(step))", "sum(price(step.move) for step in steps)",
            "DTensor pays for axes of one rank, and is called dearer than it is", "tests/strategies/planner/audit/test_compare_compare_with_torch.py"),
    bug("strategies/planner/audit/verdict::verdict_of", 'kind = "alike" if outcome.kind == "refused" else outcome.kind', 'kind = "alike"',
            "wrong values are no finding where we have no plan"),
    bug("strategies/planner/audit/verdict::verdict_of", "waste = waste_of_plan(enlarged(pair), mode)", "waste = waste_of_plan(pair, mode)",
            "of small tensors all plans cost alike: no waste is seen"),
    bug("strategies/planner/audit/shrink::_spec_on_axes", "tuple(map(kept.index, axes))", "tuple(axes)",
            "a shard order loses its axes when an axis goes, and findings stay large"),
    bug("strategies/planner/audit/report::group_by_cause", "if same is None or _severity(one) < _severity(same):", "if same is None or _severity(one) > _severity(same):",
            "of what shows the same the worst example is told"),
    bug("strategies/propagation/explicit/redistribution_text::communicating_steps", "src.mesh.size(info.mesh_dim) > 1 and not alone",
            "src.mesh.size(info.mesh_dim) > 1 and not now.is_replicate()", "an implicit all-gather goes unseen"),
    bug("strategies/propagation/explicit/redistribution_text::communicating_steps", "alone = was.is_replicate() or (was.is_shard() and now.is_partial())",
            "alone = was.is_replicate()", "a shard that becomes partial is said to communicate"),
    bug("strategies/propagation/explicit/context::Guard.without", "return self if self.below is None else Guard(self.owner, self.below.without(owner))", "return self",
            "a guard that was left first stays on the thread", "tests/strategies/propagation/explicit/test_context.py"),
    bug("strategies/torch_api/handler_table::HandlerTableViews.of", "known[0] is table and (type(table) is HandlerTableView or known[1] == table)", "known[0] is table",
            "a handler that is registered later is not watched", "tests/strategies/propagation/explicit/test_handlers.py"),
    bug("strategies/propagation/explicit/handlers::_communicates", "return all(size != 1 for size in sizes)", "return any(size != 1 for size in sizes)",
            "a collective whose group nobody can name goes unseen"),
)  # fmt: skip

_RULES: tuple[Planted, ...] = (
    bug("strategies/ops/linalg/reductions::mean_rule", '[AVG], cut="even")', "[AVG])", "the mean of uneven pieces is weighted wrongly",
            "tests/strategies/ops/linalg/test_reductions.py"),
    bug("strategies/ops/linalg/matmul::_summed", "if added is None or product.ignored:", "if True:",
            "addmm over cut columns adds its bias once a rank"),
    bug("strategies/ops/index/indexing::embedding_backward", 'range(0 if query["scale_grad_by_freq"] else grad.ndim - 1)', "range(grad.ndim - 1)",
            "gradients are divided by how often a rank saw the row, not by how often all did"),
    bug("strategies/ops/shape/views::reshaped", '(group.before[0], group.after[0])], "any" if group.same else "even")',
            '(group.before[0], group.after[0])])', "a flattened uneven shard lies elsewhere than it says", "tests/strategies/ops/shape/test_views.py"),
    bug("strategies/ops/nn/normalization::layer_norm_backward", "grads: list[Placement] = [Shard(dim), *[SUM] * (len(query.outputs) - 1)]",
            "grads: list[Placement] = [Shard(dim), *[Replicate()] * (len(query.outputs) - 1)]",
            "the gradient of a layer norm's weight is that of one rank's rows"),
    bug("strategies/ops/linalg/reductions::rows", "if dim not in normalised:", "if True:", "rows are normalised in pieces"),
    bug("strategies/ops/index/indexing::gather", "if given.shape[other] == index.shape[other]:", "if True:",
            "a shorter index is cut at other rows than its tensor"),
    bug("strategies/ops/index/scatter::scatter_reduce", 'if folded and query["include_self"]:', "if folded:",
            "values that are to be left out are folded in on every rank", "tests/strategies/ops/index/test_indexing.py"),
    bug("strategies/ops/pointwise/monotone", 'elementwise(rising(kinds=("min",)))),\n    rules("order", "never rises where',
            'elementwise(rising())),\n    rules("order", "never rises where', "the root of a P(max) with negative parts is NaN",
            "tests/strategies/ops/pointwise/test_linear_unary_binary.py"),
    bug("strategies/ops/shape/joining::cat", "if len(full) == 1:", "if full:", "two tensors are joined piece by piece: rows interleave"),
)  # fmt: skip

PLANTED: tuple[Planted, ...] = (*_SEARCHED, *_PRICED, *_CARRIED_OUT, *_THEIRS, *_RULES)
