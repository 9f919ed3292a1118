import pytest
import torch

pytest.importorskip("spmd_types")

from spmd_types import rules

from localtensor.testing import WrongHook, assert_typecheck_hook
from strategies.validation.assertions.rule import NotARule, NothingTested
from tests.tools.hooks import corpus, unseen_right, unseen_wrong
from tests.tools.hooks.kernels import draw, function

RIGHT = {hook.name: hook for hook in corpus.right()}
WRONG = {hook.name: hook for hook in corpus.wrong()}
SOME_RIGHT = (
    "gelu",
    "softmax_1",
    "cumsum_0",
    "amax_1",
    "neg",
    "matmul",
    "add",
    "divide",
    "reduce_to_I",
    "gather_to_R",
    "row_linear",
    "mean_of_rows",
)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SOME_RIGHT)
def test_a_right_hook_passes(name):
    assert_typecheck_hook(RIGHT[name].function, RIGHT[name].args)


@pytest.mark.few(2)
@pytest.mark.parametrize("mistake", corpus.CLASSES)
def test_each_class_of_mistakes_is_found(mistake):
    for hook in [one for one in WRONG.values() if one.mistake == mistake][::7]:
        with pytest.raises(WrongHook, match=hook.name):
            assert_typecheck_hook(hook.function, hook.args)


@pytest.mark.few(2)
@pytest.mark.parametrize("hook", unseen_right.every(), ids=lambda hook: hook.name)
def test_a_right_hook_of_an_author_who_had_read_the_documentation_alone_passes(hook):
    assert_typecheck_hook(hook.function, hook.args)


@pytest.mark.few(3)
@pytest.mark.parametrize("hook", unseen_wrong.every(), ids=lambda hook: hook.name)
def test_a_wrong_hook_of_an_author_who_had_read_the_documentation_alone_is_found(hook):
    with pytest.raises(WrongHook, match=hook.function.__name__):
        assert_typecheck_hook(hook.function, hook.args)


def test_the_message_names_the_claim_the_pieces_and_the_values():
    hook = WRONG["linear_square"]
    with pytest.raises(WrongHook) as found:
        assert_typecheck_hook(hook.function, hook.args)
    text = str(found.value)
    assert "types P -> P on 2 ranks, and the result is not that: as P(sum): the parts make" in text
    assert "call: linear_square.apply(f64[2,2])" in text  # shrunk from 6 x 4
    assert "tensor 0, P(sum), rank 1: [" in text and "the ranks make:   [" in text


def test_a_mistake_on_uneven_shards_alone_is_not_found_without_them():
    hook = WRONG["mean_of_mean"]
    assert_typecheck_hook(hook.function, hook.args, uneven=False)
    with pytest.raises(WrongHook, match=r"f64\[[357]"):
        assert_typecheck_hook(hook.function, hook.args)


def test_the_gradient_is_named_where_it_is_wrong():
    hook = WRONG["reduce_to_R_wrong_gradient"]
    with pytest.raises(WrongHook, match="P -> R on 2 ranks, and the gradient of tensor 0 is not that"):
        assert_typecheck_hook(hook.function, hook.args)


def test_a_kernel_whose_ranks_differ_in_control_flow_runs_on_rank_threads():
    import torch.distributed as dist

    def forward(x, group):
        return x.clone() if dist.get_rank(group) == 0 else torch.zeros_like(x)

    made = function(
        "first_only",
        "x group",
        forward,
        lambda x, group: rules.convert(x, group, src=corpus.R, dst=corpus.P),
        lambda x, group, g: (g, None),
    )
    with pytest.raises(WrongHook, match="gradient"):  # R: each rank's is a part; it gives the whole one to each
        assert_typecheck_hook(made, (draw(6, 4), "tp"), ranks=(2,))


def test_uneven_pieces_that_a_collective_refuses_are_no_fault():
    assert_typecheck_hook(RIGHT["gather_to_R"].function, RIGHT["gather_to_R"].args)


def test_a_random_kernel_is_not_tested():
    made = function("noise", "x", lambda x: x + torch.randn_like(x), lambda x: rules.einsum("mn->mn", x))
    with pytest.raises(NothingTested, match="two runs of the kernel differ: it draws random numbers"):
        assert_typecheck_hook(made, (draw(6, 4),))


def test_a_hook_that_raises_is_no_pass():
    made = function("broken", "x", torch.neg, lambda x: {}["no such key"])
    with pytest.raises(NothingTested, match=r"KeyError: .*, in broken\.spmd_typecheck"):
        assert_typecheck_hook(made, (draw(6, 4),))


def test_a_hook_that_refuses_all_is_no_pass():
    def refuses(x):
        return rules.einsum("m->m", x)

    with pytest.raises(NothingTested, match="the hook accepts no layout"):
        assert_typecheck_hook(function("refuses", "x", torch.neg, refuses), (draw(6, 4),))


def test_wrong_calls_are_one_sentence():
    with pytest.raises(NotARule, match="it is no autograd Function with a hook"):
        assert_typecheck_hook(torch.neg, (draw(2),))
    with pytest.raises(NotARule, match="there is no tensor in it"):
        assert_typecheck_hook(RIGHT["gelu"].function, (1,))
    with pytest.raises(
        NotARule, match=r"args: f32\[2,2\]: a tensor is not the arguments\. Pass the arguments of a call"
    ):
        assert_typecheck_hook(RIGHT["gelu"].function, torch.ones(2, 2))
    with pytest.raises(NotARule, match="ranks"):
        assert_typecheck_hook(RIGHT["gelu"].function, (draw(2, 2),), ranks=(1,))
    with pytest.raises(NotARule, match="ranks: 2: these are no counts"):
        assert_typecheck_hook(RIGHT["gelu"].function, (draw(2, 2),), ranks=2)
    with pytest.raises(NotARule, match="matmul raises RuntimeError"):
        assert_typecheck_hook(RIGHT["matmul"].function, (draw(6, 4), draw(3, 3)))
