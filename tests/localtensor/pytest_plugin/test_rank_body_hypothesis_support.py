import threading

import pytest
from hypothesis import HealthCheck, assume, control, given, note, settings
from hypothesis import strategies as st

from localtensor.pytest_plugin.rank_body import hypothesis_variables, relaxed_hypothesis, with_variables

pytest_plugins = ["pytester"]


def test_the_private_parts_that_we_use_are_there():
    assert hasattr(control._current_build_context, "with_value") and len(hypothesis_variables()) == 2
    assert hasattr(given(st.integers())(lambda x: None), "_hypothesis_internal_use_settings")


@given(st.integers())
def test_another_thread_speaks_to_the_same_example(x):
    seen = []

    def look():
        seen.append(control.currently_in_test_context())
        with with_variables(values):
            seen.append(control.currently_in_test_context())
            note("noted")
            assume(True)

    values = hypothesis_variables()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [False, True]


def used(test):
    return test._hypothesis_internal_use_settings


def test_fixtures_of_function_scope_and_the_default_deadline_do_not_count():
    test = given(st.integers())(lambda x: None)
    before = used(test)
    with relaxed_hypothesis(test):
        assert HealthCheck.function_scoped_fixture in used(test).suppress_health_check
        assert used(test).deadline is None
    assert used(test) is before


def test_a_deadline_of_the_test_s_own_stays():
    test = settings(deadline=1234)(given(st.integers())(lambda x: None))
    with relaxed_hypothesis(test):
        assert used(test).deadline.total_seconds() == 1.234


@pytest.mark.slow
def test_what_ranks_draw_from_data_is_the_same_on_all_of_them_under_each_schedule(tried):
    result = tried(
        """
        from hypothesis import given, settings, strategies as st

        pytest.SEEN = []
        few = settings(max_examples=5, database=None, derandomize=True)

        @pytest.mark.ranks(3, schedules=2)
        @few
        @given(data=st.data())
        def test_together(data):
            pytest.SEEN.append((data.draw(st.integers()), data.draw(st.text())))

        def test_six_times_each():
            sixes = [pytest.SEEN[at : at + 6] for at in range(0, len(pytest.SEEN), 6)]
            assert len(sixes) >= 5 and all(len(set(six)) == 1 for six in sixes) and len(set(pytest.SEEN)) > 1

        @pytest.mark.ranks(2)
        @few
        @given(data=st.data())
        def test_parted(rank, data):
            data.draw(st.text() if rank else st.integers())
        """
    )
    result.assert_outcomes(passed=2, failed=1)
    assert "data.draw: strategy: text(): another rank drew integers() as its value 1" in result.text
