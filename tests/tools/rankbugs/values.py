"""RanksDisagree and RankRaised: values that should be the same, and errors of one rank's own."""

import torch
import torch.distributed as dist
from torch import nn

import localtensor as lt
from tests.tools.rankbugs.corpus import fault, right


@fault("RanksDisagree", ranks=2)
def a_tensor_that_was_never_shared():
    x = torch.tensor([float(dist.get_rank())])
    lt.assert_same_on_all_ranks(x)  # fault


@right(ranks=2)
def a_tensor_that_was_shared():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    lt.assert_same_on_all_ranks(x)
    assert x.item() == 1.0


@fault("RanksDisagree", ranks=3)
def a_count_of_each_ranks_own():
    batches = len(range(dist.get_rank(), 10, 3))
    lt.assert_same_on_all_ranks(batches)  # fault


@right(ranks=3)
def a_count_that_all_have():
    batches = len(range(dist.get_rank(), 9, 3))
    lt.assert_same_on_all_ranks(batches)
    assert batches == 3


@fault("RanksDisagree", ranks=4)
def the_name_of_the_run_has_the_rank_in_it():
    name = f"run-{dist.get_rank() // 3}"
    lt.assert_same_on_all_ranks(name)  # fault


@right(ranks=4)
def the_name_of_the_run_comes_from_rank_zero():
    names = [f"run-{dist.get_rank() // 3 + 7}"]
    dist.broadcast_object_list(names, src=0)
    lt.assert_same_on_all_ranks(names[0])
    assert names == ["run-7"]


@fault("RanksDisagree", ranks=2)
def one_setting_differs():
    settings = {"lr": 0.1, "layers": 2, "seed": 40 + dist.get_rank()}
    lt.assert_same_on_all_ranks(settings)  # fault


@right(ranks=2)
def no_setting_differs():
    settings = {"lr": 0.1, "layers": [2, 3], "seed": 40}
    lt.assert_same_on_all_ranks(settings)
    assert settings["layers"] == [2, 3]


@fault("RanksDisagree", ranks=3)
def the_model_was_seeded_with_the_rank():
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(3, 2)
    for weight in model.parameters():
        lt.assert_same_on_all_ranks(weight)  # fault


@right(ranks=3)
def the_model_was_broadcast():
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(3, 2)
    for weight in model.parameters():
        dist.broadcast(weight.data, src=0)
        lt.assert_same_on_all_ranks(weight)
    assert sum(weight.numel() for weight in model.parameters()) == 8


def trained(average):
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    for step in range(3):
        model.zero_grad()
        model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
        if average or step < 2:
            dist.all_reduce(model.weight.grad)
        with torch.no_grad():
            model.weight -= 0.5 * model.weight.grad
    return model


@fault("RanksDisagree", ranks=2)
def the_third_gradient_was_not_averaged():
    model = trained(average=False)
    lt.assert_same_on_all_ranks(model.weight)  # fault


@right(ranks=2)
def every_gradient_was_averaged():
    model = trained(average=True)
    lt.assert_same_on_all_ranks(model.weight)
    assert model.weight.tolist() == [[-0.5, -0.5]]


def checked(mask):
    lt.assert_same_on_all_ranks(mask)  # fault
    return mask


@fault("RanksDisagree", ranks=4, helpers=(checked,))
def the_last_rank_drew_once_more():
    torch.manual_seed(3)
    if dist.get_rank() == 3:
        torch.rand(1)
    checked(torch.rand(16) > 0.5)


@right(ranks=4)
def every_rank_drew_as_often():
    torch.manual_seed(3)
    mask = checked(torch.rand(16) > 0.5)
    count = mask.sum()
    dist.all_reduce(count)
    assert count.item() == 4 * mask.sum().item()


@right(ranks=2)
def what_is_not_a_number_is_so_everywhere():
    x = torch.tensor([1.0, float("nan")])
    lt.assert_same_on_all_ranks(x)
    assert x.isnan().tolist() == [False, True]


@fault("RanksDisagree", ranks=8)
def the_steps_of_the_schedule_differ_at_the_end():
    steps = ["forward"] * 3 + (["forward"] if dist.get_rank() == 4 else ["backward"])
    lt.assert_same_on_all_ranks(steps)  # fault


# -- errors


@fault("RankRaised", ranks=2)
def one_rank_finds_a_bad_sample():
    x = torch.ones(2)
    if dist.get_rank() == 1:
        raise ValueError("bad sample")  # fault
    dist.all_reduce(x)


@right(ranks=2)
def one_rank_finds_a_bad_sample_and_replaces_it():
    x = torch.ones(2)
    try:
        if dist.get_rank() == 1:
            raise ValueError("bad sample")  # noqa: TRY301
    except ValueError:
        x = torch.zeros(2)
    dist.all_reduce(x)
    assert x.tolist() == [1.0, 1.0]


@fault("RankRaised", ranks=3)
def one_rank_has_no_such_setting():
    settings = {"lr": 0.1} if dist.get_rank() == 0 else {"lr": 0.1, "decay": 0.0}
    decay = settings["decay"]  # fault
    dist.all_reduce(torch.tensor(decay))


@right(ranks=3)
def one_rank_has_a_default_for_the_setting():
    settings = {"lr": 0.1} if dist.get_rank() == 0 else {"lr": 0.1, "decay": 2.0}
    decay = torch.tensor(settings.get("decay", 1.0))
    dist.all_reduce(decay)
    assert decay.item() == 5.0


@fault("RankRaised", ranks=4)
def the_last_rank_multiplies_what_does_not_fit():
    x = torch.ones(2, 4 if dist.get_rank() == 3 else 3)
    y = x @ torch.ones(3, 2)  # fault
    dist.all_reduce(y)


@right(ranks=4)
def every_rank_multiplies_what_fits():
    inner = 4 if dist.get_rank() == 3 else 3
    y = torch.ones(2, inner) @ torch.ones(inner, 2)
    dist.all_reduce(y)
    assert y.sum().item() == 4 * 13.0


@fault("RankRaised", ranks=2)
def an_assertion_holds_on_one_rank_only():
    x = torch.tensor([float(dist.get_rank())])
    assert x.item() > 0, "nothing to send"  # fault
    dist.recv(x, src=0)


class Router(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(experts))

    def forward(self, x, expert):
        y = self.experts[expert](x)  # fault
        dist.all_reduce(y)
        return y


@fault("RankRaised", ranks=3, helpers=(Router.forward,))
def one_rank_routes_to_an_expert_that_is_not_there():
    model = Router(experts=2)
    with torch.no_grad():
        model(torch.ones(1, 2), expert=dist.get_rank())


@right(ranks=3)
def each_rank_routes_to_an_expert_that_is_there():
    model = Router(experts=3)
    for weight in model.parameters():
        nn.init.ones_(weight)
    with torch.no_grad():
        y = model(torch.ones(1, 2), expert=dist.get_rank())
    assert y.tolist() == [[9.0, 9.0]]


@fault("RankRaised", ranks=4)
def in_the_third_batch_one_index_is_too_large():
    table = torch.arange(4)
    for batch in range(4):
        x = table[batch + (3 if dist.get_rank() == 1 and batch == 2 else 0)]  # fault
        dist.all_reduce(x.clone())


@fault("RankRaised", ranks=2)
def a_rank_that_is_not_the_source_brings_pieces():
    mine = torch.empty(2)
    dist.scatter(mine, [torch.ones(2), torch.ones(2)], src=0)  # fault


def refuse(gradient):
    if gradient.sum() > 3:
        raise FloatingPointError("gradient too large")  # fault


@fault("RankRaised", ranks=2, helpers=(refuse,))
def a_hook_raises_on_one_rank():
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(refuse)
    ((1 + dist.get_rank()) * weight).sum().backward()
    dist.all_reduce(weight.grad)


@right(ranks=2)
def a_hook_does_not_raise():
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(refuse)
    ((0.5 + dist.get_rank()) * weight).sum().backward()
    dist.all_reduce(weight.grad)
    assert weight.grad.tolist() == [2.0, 2.0]


@fault("RankRaised", ranks=3)
def an_error_is_raised_when_all_is_done():
    x = torch.ones(2)
    dist.all_reduce(x)
    if dist.get_rank() == 2:
        raise RuntimeError("cannot write the checkpoint")  # fault


@fault("RanksDisagree", ranks=3)
def a_deep_setting_differs_in_its_kind():
    state = {"optimizer": {"lr": 0.5, "betas": (0.9, 0.99)}, "step": torch.tensor(3)}
    if dist.get_rank() == 1:
        state["optimizer"]["betas"] = (0.9, 0.999)
    lt.assert_same_on_all_ranks(state)  # fault


class OutOfSamples(Exception):
    """A user's own kind of error."""


def sample(number):
    if number > 4:
        raise OutOfSamples(number)  # fault
    return torch.tensor([float(number)])


@fault("RankRaised", ranks=5, helpers=(sample,))
def the_last_of_five_runs_out_of_samples():
    group = dist.new_group([3, 4])
    for step in range(2):
        x = sample(dist.get_rank() + step)
        if dist.get_rank() >= 3:
            dist.all_reduce(x, group=group)


@right(ranks=5)
def the_last_of_five_gets_by_with_its_samples():
    group = dist.new_group([3, 4])
    for step in range(2):
        x = sample(max(dist.get_rank() - step, 0))
        if dist.get_rank() >= 3:
            dist.all_reduce(x, group=group)
    assert x.item() == [0.0, 0.0, 1.0, 5.0, 5.0][dist.get_rank()]
