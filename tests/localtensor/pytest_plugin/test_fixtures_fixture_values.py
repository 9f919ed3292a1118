"""The fixture `world`, and `comms` beside it."""

pytest_plugins = ["pytester"]

PROGRAM = """
    def total(x):
        dist.all_reduce(x)
        return x.item()

"""


def test_an_ordinary_test_runs_functions_on_ranks(tried):
    result = tried(
        PROGRAM + """
    def test_four(world, comms):
        assert list(world.run(total, torch.tensor(1), ranks=4)) == [4, 4, 4, 4]
        assert comms.count("all_reduce") == 4 and comms.of("all_reduce")[0].rank in range(4)
        world.run(dist.barrier, ranks=2)
        assert comms.kinds == ["barrier", "barrier"]

    def test_as_the_options_say(world):
        run = world.run(total, torch.tensor(1))
        assert list(run) == [3, 3, 3] and run.replay.startswith("shuffled:5=")
        assert world.run(total, torch.tensor(1), schedule="round_robin").replay == "round_robin"
    """,
        "--ranks=3", "--rank-schedule=shuffled:5",
    )  # fmt: skip
    result.assert_outcomes(passed=2)


def test_comms_before_a_run_are_refused_for_an_assertion_on_nothing_would_pass(tried):
    result = tried("def test_a(world, comms): assert comms.count('all_reduce') == 0\n")
    result.assert_outcomes(failed=1)
    assert "comms: world.run was not called yet. Read it after a world.run on rank threads." in result.text


def test_the_failure_of_a_run_is_shown_at_the_lines_of_the_test(tried):
    result = tried(
        """
    def wrong():
        assert dist.get_rank() == 0

    def test_a(world):
        world.run(wrong)
    """
    )
    result.assert_outcomes(failed=1)
    assert ">       world.run(wrong)" in result.text and "threads.py" not in result.text
    assert "RankRaised: run: rank 1:" in result.text


def test_the_log_of_a_run_that_failed_is_there(tried):
    result = tried(
        """
    from localtensor.errors import EarlyReturn

    def leaves():
        if dist.get_rank() == 0:
            dist.barrier()

    def test_a(world, comms):
        with pytest.raises(EarlyReturn):
            world.run(leaves)
        assert comms.kinds == ["barrier"]
    """
    )
    result.assert_outcomes(passed=1)
