"""Fixtures of rank tests: once for all ranks, or in each."""

import pytest
from _pytest.fixtures import FixtureDef, FuncFixtureInfo, SubRequest

pytest_plugins = ["pytester"]


def test_the_private_parts_of_pytest_that_we_use_are_there(request):
    assert "name2fixturedefs" in FuncFixtureInfo.__slots__ or "name2fixturedefs" in FuncFixtureInfo.__annotations__
    assert request._pyfuncitem._fixtureinfo.name2fixturedefs is not None
    assert callable(FixtureDef.cache_key) and isinstance(request, pytest.FixtureRequest)
    assert {"_parent_request", "_fixturedef"} <= set(SubRequest.__init__.__code__.co_names)


def test_ordinary_fixtures_are_set_up_once_and_those_of_a_rank_in_each(tried):
    tried(
        """
        pytest.LOG = []

        @pytest.fixture(scope="module")
        def model():
            pytest.LOG.append("model")
            return object()

        @pytest.fixture
        def shared():
            pytest.LOG.append("shared")
            yield {}
            pytest.LOG.append("shared down")

        @pytest.fixture
        def mine(rank, shared, model):
            pytest.LOG.append(f"mine {rank}")
            yield rank * 10
            dist.barrier()
            pytest.LOG.append(f"mine down {rank}")

        @pytest.fixture(params=["a", "b"])
        def lettered(mine, request):
            request.addfinalizer(lambda: pytest.LOG.append(f"lettered down {mine}"))
            return f"{request.param}{mine}"

        @pytest.mark.ranks(2)
        def test_a(lettered, rank, shared):
            assert lettered[1:] == str(10 * rank)
            shared[rank] = "seen"
            dist.barrier()
            assert len(shared) == 2

        def test_log():
            assert pytest.LOG[0] == "model" and pytest.LOG.count("model") == 1
            half = (len(pytest.LOG) - 1) // 2
            assert pytest.LOG[1 : half + 1] == pytest.LOG[half + 1 :]
            once = pytest.LOG[1 : half + 1]
            assert once[0] == "shared" and once[-1] == "shared down"
            assert sorted(once[1:3]) == ["mine 0", "mine 1"]
            assert once.index("lettered down 0") < once.index("mine down 0")
            assert once.index("lettered down 10") < once.index("mine down 1")
        """
    ).assert_outcomes(passed=3)


def test_autouse_overrides_methods_and_dynamic_requests(tried):
    tried(
        """
        pytest.SEEN = []

        @pytest.fixture
        def value(rank):
            return rank

        @pytest.fixture(autouse=True)
        def noted(request):
            pytest.SEEN.append("ordinary")

        class TestMethods:
            @pytest.fixture
            def value(self, value):
                return value + 1

            @pytest.fixture(autouse=True)
            def every(self, rank):
                self.mine = rank

            @pytest.mark.ranks(2)
            def test_override(self, value, rank, request):
                dist.barrier()
                assert value == rank + 1 and self.mine == rank
                assert request.instance is self

        @pytest.mark.ranks(2)
        def test_dynamic(request, tmp_path):
            assert request.getfixturevalue("value") == dist.get_rank() == request.getfixturevalue("rank")
            assert request.getfixturevalue("tmp_path") is tmp_path
            request.addfinalizer(lambda: pytest.SEEN.append("bye"))

        def test_seen():
            assert pytest.SEEN == ["ordinary", "ordinary", "bye", "bye", "ordinary"]
        """
    ).assert_outcomes(passed=3)


def test_a_fixture_of_the_same_name_may_ask_for_ours(tried):
    tried(
        """
        @pytest.fixture
        def rank(rank):
            return rank + 100

        def test_a(rank):
            assert rank == dist.get_rank() + 100 and dist.get_world_size() == 3
        """,
        "--ranks=3",
    ).assert_outcomes(passed=1)


def test_async_fixtures_of_a_rank_share_its_loop_with_the_test(tried):
    tried(
        """
        import asyncio

        pytest.DOWN = []

        @pytest.fixture
        async def mine(rank):
            yield rank, asyncio.get_running_loop()
            await asyncio.sleep(0)
            pytest.DOWN.append(rank)

        @pytest.fixture
        async def plain(rank):
            return -rank

        @pytest.mark.ranks(2)
        async def test_async(mine, plain, rank):
            assert mine == (rank, asyncio.get_running_loop()) and plain == -rank

        def test_down():
            assert sorted(pytest.DOWN) == [0, 1]
        """
    ).assert_outcomes(passed=2)


def test_a_fixture_that_fails_in_a_rank_fails_the_test_at_its_line(tried):
    result = tried(
        """
        @pytest.fixture
        def bad(rank):
            assert rank == 0

        @pytest.mark.ranks(2)
        def test_a(bad):
            pass
        """
    )
    result.assert_outcomes(failed=1)
    assert ">       assert rank == 0" in result.text and "First cause: rank 1 of 2, at test_it.py" in result.text
    assert "rank_fixtures.py" not in result.text


def test_a_failure_is_not_hidden_by_what_its_fixtures_do_after_it(tried):
    result = tried(
        """
        @pytest.fixture
        def ends_together(rank):
            yield
            dist.barrier()

        @pytest.mark.ranks(3)
        def test_a(ends_together, rank):
            assert rank != 0
            dist.all_reduce(torch.ones(2))
        """
    )
    result.assert_outcomes(failed=1)
    assert ">       assert rank != 0" in result.text and "KindMismatch" not in result.text
    assert "ranks 1, 2 were at test_it.py" in result.text


def test_a_teardown_that_fails_fails_the_test(tried):
    result = tried(
        """
        @pytest.fixture
        def ends(rank):
            yield
            assert rank == 0, "not torn down"

        @pytest.fixture
        def twice(rank):
            yield
            yield

        @pytest.mark.ranks(2)
        def test_a(ends):
            pass

        @pytest.mark.ranks(2)
        def test_b(twice):
            pass
        """
    )
    result.assert_outcomes(failed=2)
    assert "AssertionError: not torn down" in result.text and "fixture twice has more than one 'yield'" in result.text


def test_an_ordinary_fixture_that_asks_for_the_rank_by_name_is_told_how_to(tried):
    result = tried(
        """
        @pytest.fixture
        def sly(request):
            return request.getfixturevalue("rank")

        @pytest.mark.ranks(2)
        def test_a(sly):
            pass

        @pytest.mark.ranks(2)
        def test_b(rank):
            assert rank in (0, 1)
        """
    )
    result.assert_outcomes(errors=1, passed=1)
    assert "fixture sly: request.getfixturevalue: 'rank': it has a value in each rank" in result.text
    assert "Traceback" not in result.text and "fixtures.py" not in result.text


def test_a_fixture_of_the_users_own_comes_first_and_a_failure_says_so(tried, pytester):
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture
        def rank():
            return "general"
        """
    )
    result = tried(
        """
        def test_plain(rank):
            assert rank == "general"

        @pytest.mark.ranks(2)
        def test_marked(rank, world_size):
            assert rank == "general" and world_size == 2

        @pytest.mark.ranks(2)
        def test_taken_for_ours(rank):
            assert rank == dist.get_rank()

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("rank", [5])
        def test_parameter(rank):
            assert rank == dist.get_rank()
        """
    )
    result.assert_outcomes(passed=2, failed=2)
    assert result.text.count("Note: the fixture ") == 1
    assert "Note: the fixture rank is that of conftest, which comes before localtensor's." in result.text


def test_compare_is_that_of_the_library_with_the_options_of_the_session(tried):
    text = """
        import torch
        from torch import nn

        def test_right(compare):
            done = compare(lambda: nn.Linear(4, 2), lambda m, mesh: None, lambda: torch.randn(4, 4), mesh={"tp": 2})
            assert done.divergence is None

        def test_wrong(compare):
            compare.functions(lambda x: x.sum(0), lambda x, mesh: x.chunk(2)[mesh.get_rank()].sum(0),
                              lambda: (torch.arange(8.0).view(4, 2),), mesh={"dp": 2})

        def test_without_the_fixture():
            localtensor.compare(lambda: nn.Linear(4, 2), lambda m, mesh: nn.Linear(4, 2), torch.ones(4, 4), mesh={"tp": 2})
    """
    result = tried(text.replace("import torch", "import localtensor, torch", 1))
    result.assert_outcomes(passed=1, failed=2)
    assert (
        "an all_reduce over dp is missing" in result.text
        and "the parallel program differs from one device" in result.text
    )
    assert "def compare" not in result.text  # whose lines are not the user's
