from localtensor.threads.symmetric.order import Order


def currents(order):
    return [host.current for host in order.hosts]


def test_what_a_rank_has_waited_for_happens_before_what_it_issues_to_any_stream():
    order = Order(2)
    first, second = currents(order)
    other, time = order.new_lane(1), first.time
    order.acquire(1, order.release(0))
    for lane in (second, other):
        lane.follow_host()
        assert lane.knows(first.number, time)


def test_a_stream_that_learns_orders_no_other_stream_of_its_rank():
    order = Order(2)
    first, second = currents(order)
    other, time = order.new_lane(1), first.time
    second.learn(first.publish())
    other.follow_host()
    assert second.knows(first.number, time)
    assert not other.knows(first.number, time)


def test_what_follows_a_publication_is_no_part_of_it():
    order = Order(2)
    first, second = currents(order)
    clock = first.publish()
    second.learn(clock)
    assert not second.knows(first.number, first.time)


def test_order_is_transitive_and_not_symmetric():
    first, second, third = currents(Order(3))
    time = first.time
    second.learn(first.publish())
    third.learn(second.publish())
    assert third.knows(first.number, time)
    assert not first.knows(third.number, third.time)


def test_known_to_all_is_what_each_stream_knows():
    order = Order(2)
    first, second = currents(order)
    time = first.time
    assert order.known_to_all({0, 1})[first.number] == 0
    second.learn(first.publish())
    assert order.known_to_all({0, 1})[first.number] == time
