from localtensor._util.events import Call
from localtensor.pytest_plugin.comms import MOST_SHOWN, Comms


def call(rank, kind="all_reduce", number=0, size=16):
    return Call(rank, kind, "0", (0, 1), number, ("f32[4]",), size)


LOG = [call(0), call(1), call(0, "barrier", 1, 0), call(1, "barrier", 1, 0), call(0, number=2), call(1, number=2)]


def test_a_rank_sees_its_own_calls_in_order():
    comms = Comms(lambda: LOG, 1)
    assert comms.kinds == ["all_reduce", "barrier", "all_reduce"]
    assert list(comms) == [LOG[1], LOG[3], LOG[5]] and comms[-1] is LOG[5] and comms[:2] == [LOG[1], LOG[3]]
    assert (comms.count("all_reduce"), comms.count("send"), comms.count(LOG[1]), comms.bytes) == (2, 0, 1, 32)


def test_the_calls_of_all_ranks_and_those_of_a_kind():
    comms = Comms(lambda: LOG, 1)
    assert len(comms.of_all_ranks) == 6
    assert [one.rank for one in comms.of("barrier").of_all_ranks] == [0, 1]
    assert not comms.of("broadcast")


def test_it_is_live():
    log = []
    comms = Comms(lambda: log, 0)
    assert len(comms) == 0 and repr(comms) == "Comms(rank 0: nothing yet)"
    log.append(LOG[0])
    assert comms.kinds == ["all_reduce"]


def test_its_repr_says_what_was_called_and_stays_short():
    assert (
        repr(Comms(lambda: LOG[:2], None))
        == "Comms(all ranks: rank 0 all_reduce #0 of f32[4], rank 1 all_reduce #0 of f32[4])"
    )
    many = repr(Comms(lambda: [call(0, number=number) for number in range(MOST_SHOWN + 5)], 0))
    assert many.endswith("and 5 more)") and many.count("all_reduce") == MOST_SHOWN
