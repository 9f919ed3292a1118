"""A rank begins with what fixtures have put in place for pytest's thread; what it reports without raising counts on each way."""

import pytest

pytest_plugins = ["pytester"]

MODES = """
    import contextvars
    import decimal

    import numpy

    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    pytestmark = pytest.mark.ranks(2)
    variable = contextvars.ContextVar("variable", default=0)

    def of(make):
        @pytest.fixture
        def made():
            with make() as value:
                yield value
        return made

    class Functions(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen += 1
            return function(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen += 1
            return function(*args, **(kwargs or {}))

    no_grad, inference = of(torch.no_grad), of(torch.inference_mode)
    cast = of(lambda: torch.autocast("cpu", torch.bfloat16))
    meta = of(lambda: torch.device("meta"))
    functions, ops = of(Functions), of(Ops)
    precise, strict = of(lambda: decimal.localcontext(prec=5)), of(lambda: numpy.errstate(all="raise"))
    packed = []
    hooks = of(lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x))

    @pytest.fixture
    def set_variable():
        token = variable.set(9)
        yield
        variable.reset(token)

    def test_gradients(rank, no_grad):
        dist.barrier()
        assert not torch.is_grad_enabled()

    def test_inference(rank, inference):
        assert torch.is_inference_mode_enabled()

    def test_backward_stays_in_the_thread_of_its_rank(rank):
        assert not torch.autograd.is_multithreading_enabled()

    def test_autocast(rank, cast):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16

    def test_device(rank, meta):
        assert torch.ones(2).is_meta

    def test_functions(rank, functions):
        before = functions.seen
        torch.ones(2) + 1
        assert functions.seen > before

    def test_ops(rank, ops):
        dist.barrier()
        before = ops.seen
        torch.ones(2) + 1
        assert ops.seen >= before + 2

    def test_saved_tensors(rank, hooks):
        before = len(packed)
        torch.ones(2, requires_grad=True).exp()
        assert len(packed) > before

    def test_decimal(rank, precise):
        assert decimal.getcontext().prec == 5
        decimal.getcontext().prec = 7 + rank
        dist.barrier()
        assert decimal.getcontext().prec == 7 + rank

    def test_numpy(rank, strict):
        with pytest.raises(FloatingPointError):
            numpy.float64(1) / numpy.float64(0)

    def test_variable(rank, set_variable):
        assert variable.get() == 9
        variable.set(rank)
        dist.barrier()
        assert variable.get() == rank

    def test_nothing_is_left(rank):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")
        assert not torch.ones(2).is_meta and variable.get() == 0 and decimal.getcontext().prec == 28
    """


def test_modes_and_context_variables_of_fixtures_are_there_in_each_rank(tried):
    tried(MODES).assert_outcomes(passed=12)


def test_generators_of_fixtures_are_each_ranks_own(tried):
    tried(
        """
        import random

        import numpy

        GENERATORS = {
            "torch": lambda: torch.Generator().manual_seed(3),
            "numpy": lambda: numpy.random.default_rng(3),
            "old": lambda: numpy.random.RandomState(3),
            "python": lambda: random.Random(3),
        }

        @pytest.fixture
        def made(name):
            return GENERATORS[name]()

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("name", GENERATORS)
        def test_draws(rank, name, made):
            def draw(one):
                return torch.rand(2, generator=one).tolist() if isinstance(one, torch.Generator) else one.random()

            dist.barrier()
            assert draw(made) == draw(GENERATORS[name]())
        """
    ).assert_outcomes(passed=4)


UNITS = """
    import unittest

    done = []

    class TestUnit(unittest.TestCase):
        @pytest.mark.ranks(2)
        def test_subtests(self):
            for number in range(2):
                with self.subTest(number=number):
                    self.assertEqual(number, 0)

        @pytest.mark.ranks(2)
        def test_cleanup_fails(self):
            self.addCleanup(self.assertEqual, dist.get_rank(), 0)

        @pytest.mark.ranks(2)
        def test_cleanups_run_in_their_rank(self):
            def last(rank):
                assert dist.get_rank() == rank
                dist.barrier()
                assert kept == ["first"]

            kept = []
            self.addCleanup(last, dist.get_rank())
            self.addCleanup(kept.append, "first")

    @pytest.mark.ranks(2)
    def test_fixture(rank, subtests):
        for number in range(2):
            with subtests.test(number=number):
                assert number == rank
    """


@pytest.mark.parametrize("on", ["threads", "gloo"])
def test_what_fails_in_a_subtest_or_a_cleanup_of_a_rank_fails(tried, on):
    result = tried(UNITS, "--ranks-on", on, "-rA")
    assert result.ret == 1
    assert "FAILED test_it.py::TestUnit::test_cleanup_fails" in result.text
    assert "PASSED test_it.py::TestUnit::test_cleanups_run_in_their_rank" in result.text
    failed = "FAILED" if on == "gloo" else "SUBFAILED"
    for name in ("TestUnit::test_subtests", "test_fixture"):
        assert any(line.startswith(failed) and f"::{name}" in line for line in result.text.splitlines())
    assert on == "threads" or "contains 1 failed subtest" in result.text


@pytest.mark.few(2)
@pytest.mark.parametrize("on", ["threads", "gloo"])
@pytest.mark.parametrize("first", [0, 1])
def test_an_exception_that_no_xfail_expects_fails_whichever_rank_raises_it(tried, on, first):
    result = tried(
        f"""
        @pytest.mark.ranks(2)
        @pytest.mark.xfail(raises=KeyError)
        def test_other(rank):
            raise KeyError if rank == {first} else ValueError

        @pytest.mark.ranks(2)
        @pytest.mark.xfail(raises=pytest.RaisesExc(KeyError))
        def test_expected(rank):
            if rank == {first}:
                raise KeyError
            dist.barrier()
        """,
        "--ranks-on", on,
    )  # fmt: skip
    result.assert_outcomes(failed=1, xfailed=1)
