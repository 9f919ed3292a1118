"""Forty programs with one fault each, four of each kind."""

import torch
import torch.distributed as dist

from tests.tools.symmetric.labels import buffer, faulty, flag, name, of, until

OPS = torch.ops.symm_mem
RACE = "SymmetricRace"


# 1. A read before the write of a peer is known to have happened.


@faulty("no order before a read", RACE)
def read_without_a_barrier():
    mine, h = buffer(4)
    mine.fill_(h.rank)  # here
    return of(h, h.rank + 1, 4).clone()  # here


@faulty("no order before a read", RACE, ranks=4)
def all_reduce_without_a_barrier():
    mine, h = buffer(4, fill=0)
    h.barrier()
    mine.add_(h.rank)  # here
    return sum(of(h, peer, 4) for peer in range(1, 4) if peer != h.rank)  # here


@faulty("no order before a read", RACE)
def read_ordered_by_a_broadcast_of_the_reader():
    mine, h = buffer(4, fill=0)
    h.barrier()
    if h.rank == 0:
        mine.fill_(3)  # here
    dist.broadcast(torch.ones(1), 1)
    if h.rank == 1:
        of(h, 0, 4).sum()  # here


@faulty("no order before a read", RACE, ranks=3)
def a_signal_reaches_one_of_two_readers():
    mine, h = buffer(4, fill=0)
    h.barrier()
    if h.rank == 0:
        mine.fill_(1)  # here
        h.put_signal(1)
    elif h.rank == 1:
        h.wait_signal(0)
        of(h, 0, 4).sum()
    else:
        of(h, 0, 4).sum()  # here


# 2. A buffer is overwritten while a peer may still read it.


@faulty("no order before a reuse", RACE)
def overwritten_after_one_barrier():
    mine, h = buffer(4, fill=0)
    h.barrier()
    for step in range(3):
        mine.fill_(step)  # here
        h.barrier()
        of(h, h.rank + 1, 4).clone()  # here


@faulty("no order before a reuse", RACE)
def double_buffer_of_one_half():
    mine, h = buffer(2, 4)
    for step in range(4):
        if h.rank == 0:
            mine[step % 2].fill_(step)  # here
            h.put_signal(1, channel=step % 2)
        else:
            h.wait_signal(0, channel=step % 2)
            of(h, 0, 2, 4)[step % 2].sum()  # here


@faulty("no order before a reuse", RACE, ranks=4)
def all_gather_without_a_last_barrier():
    mine, h = buffer(4, fill=1)
    h.barrier()
    torch.cat([of(h, peer, 4) for peer in range(4)])  # here
    mine.zero_()  # here


@faulty("no order before a reuse", RACE)
def acknowledged_before_the_read():
    mine, h = buffer(4, fill=0)
    h.barrier()
    for step in range(2):
        if h.rank == 0:
            mine.fill_(step)  # here
            h.put_signal(1)
            h.wait_signal(1)
        else:
            h.wait_signal(0)
            h.put_signal(0)
            of(h, 0, 4).sum()  # here


# 3. Two ranks write the same bytes.


@faulty("overlapping writes", RACE, ranks=4)
def push_to_the_same_place():
    _, h = buffer(4)
    of(h, 0, 4)[0] = float(h.rank)  # here


@faulty("overlapping writes", RACE, ranks=3)
def shards_that_overlap_by_one():
    _, h = buffer(10)
    first = 3 * h.rank
    of(h, 0, 10)[first : first + 4].fill_(h.rank)  # here


@faulty("overlapping writes", RACE)
def an_offset_in_the_wrong_unit():
    _, h = buffer(8)
    of(h, 0, 2, at=h.rank).fill_(h.rank)  # here


@faulty("overlapping writes", RACE)
def a_column_and_a_row_that_cross():
    _, h = buffer(4, 4)
    grid = of(h, 0, 4, 4)
    if h.rank:
        grid[:, 2].fill_(1)  # here
    else:
        grid[1].fill_(0)  # here


# 4. The wrong signal is waited for.


@faulty("wrong signal", RACE + " SignalNotConsumed", ranks=3)
def waits_for_the_wrong_peer():
    mine, h = buffer(4, fill=0)
    h.barrier()
    if h.rank == 0:
        mine.fill_(1)  # here
        h.put_signal(2)
    elif h.rank == 1:
        h.put_signal(2)
    else:
        h.wait_signal(1)
        of(h, 0, 4).sum()  # here
        h.wait_signal(0)


@faulty("wrong signal", RACE)
def waits_for_the_wrong_channel():
    mine, h = buffer(2, 4)
    if h.rank == 0:
        for part in range(2):
            mine[part].fill_(part)  # here
            h.put_signal(1, channel=part)
    else:
        h.wait_signal(0, channel=0)
        of(h, 0, 2, 4)[1].sum()  # here
        h.wait_signal(0, channel=1)


@faulty("wrong signal", RACE)
def polls_the_wrong_flag():
    _, h = buffer(2, 4)
    if h.rank == 0:
        for part in range(2):
            of(h, 1, 2, 4)[part].fill_(part)  # here
            flag(h, 1, part).fill_(1)
    else:
        until(flag(h, 1, 0), 1)
        of(h, 1, 2, 4)[1].sum()  # here


@faulty("wrong signal", RACE, schedules=True)
def waits_for_the_epoch_before():
    mine, h = buffer(4)
    for epoch in (1, 2):
        if h.rank == 0:
            until(flag(h, 0), epoch - 2)
            of(h, 1, 4).fill_(epoch)  # here
            flag(h, 1).fill_(epoch)
        else:
            until(flag(h, 1), epoch)
            mine.sum()  # here
            flag(h, 0).fill_(epoch)


# 5. The signal comes before the data.


@faulty("signal before the data", RACE)
def signal_then_write():
    mine, h = buffer(4, fill=0)
    h.barrier()
    if h.rank == 0:
        h.put_signal(1)
        mine.fill_(1)  # here
    else:
        h.wait_signal(0)
        of(h, 0, 4).sum()  # here


@faulty("signal before the data", RACE)
def flag_then_push():
    mine, h = buffer(4, fill=0)
    h.barrier()
    if h.rank == 0:
        flag(h, 1).fill_(1)
        of(h, 1, 4).fill_(1)  # here
    else:
        until(flag(h, 1), 1)
        mine.sum()  # here


@faulty("signal before the data", RACE)
def barrier_then_write():
    mine, h = buffer(4, fill=0)
    h.barrier()
    mine.fill_(2)  # here
    return of(h, h.rank + 1, 4).sum()  # here


@faulty("signal before the data", RACE)
def one_of_two_writes_comes_late():
    mine, h = buffer(8, fill=0)
    h.barrier()
    if h.rank == 0:
        mine[:4].fill_(1)
        h.put_signal(1)
        mine[4:].fill_(1)  # here
    else:
        h.wait_signal(0)
        of(h, 0, 8).sum()  # here


# 6. Streams that do not wait for each other.


@faulty("streams without order", RACE)
def a_side_stream_writes_and_the_main_one_signals():
    mine, h = buffer(4, fill=0)
    h.barrier()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with side:
        mine.fill_(5)  # here
    h.barrier()
    of(h, h.rank + 1, 4).sum()  # here


@faulty("streams without order", RACE)
def a_side_stream_reads_after_a_barrier_of_the_main_one():
    mine, h = buffer(4, fill=0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    h.barrier()
    mine.fill_(1)  # here
    h.barrier()
    with side:
        of(h, h.rank + 1, 4).sum()  # here


@faulty("streams without order", RACE, ranks=1)
def two_streams_of_one_rank():
    mine, _ = buffer(4, fill=0)
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    mine.fill_(1)  # here
    with side:
        event.wait()
        mine.add_(1)  # here


@faulty("streams without order", RACE)
def the_buffer_is_reused_before_the_side_stream_ends():
    mine, h = buffer(4, fill=0)
    side = torch.cuda.Stream()
    h.barrier()
    side.wait_stream(torch.cuda.current_stream())
    with side:
        of(h, h.rank + 1, 4).clone()  # here
    h.barrier()
    mine.fill_(2)  # here


# 7. Memory that no rank has written is read.


@faulty("unwritten memory", "ReadUnwritten")
def nothing_was_written():
    _, h = buffer(4)
    h.barrier()
    return of(h, h.rank + 1, 4).clone()  # here


@faulty("unwritten memory", "ReadUnwritten")
def only_a_part_was_written():
    mine, h = buffer(8)
    mine[:4].zero_()
    h.barrier()
    return of(h, h.rank + 1, 8).sum()  # here


@faulty("unwritten memory", "ReadUnwritten")
def a_sum_into_new_memory():
    _, h = buffer(4)
    h.barrier()
    if h.rank == 0:
        of(h, 1, 4).add_(1)  # here


@faulty("unwritten memory", "ReadUnwritten", ranks=4)
def a_slot_that_no_rank_fills():
    mine, h = buffer(4)
    for peer in range(4):
        if h.rank:
            of(h, peer, 4)[h.rank] = 1.0
    h.barrier()
    return mine.sum()  # here


# 8. Outside of the buffer, or of the group.


@faulty("out of bounds", "OutsideBuffer")
def more_elements_than_there_are():
    _, h = buffer(4, fill=0)
    h.get_buffer(1, (5,), torch.float32)  # here


@faulty("out of bounds", "OutsideBuffer", ranks=4)
def an_offset_behind_the_end():
    _, h = buffer(8, fill=0)
    h.get_buffer(0, (2,), torch.float32, storage_offset=3 * h.rank)  # here


@faulty("out of bounds", "OutsideBuffer")
def a_wider_dtype():
    _, h = buffer(4, fill=0)
    h.get_remote_tensor(1, (4,), torch.float64)  # here


@faulty("out of bounds", "NoSuchPeer", ranks=3)
def a_peer_that_is_not_there():
    _, h = buffer(4, fill=0)
    h.get_buffer(h.rank + 1, (4,), torch.float32)  # here


# 9. Signals that no rank consumes, and waits that no signal ends.


@faulty("lost signal", "SignalNotConsumed")
def one_signal_too_many():
    _, h = buffer(4)
    if h.rank == 0:
        h.put_signal(1, channel=0)
        h.put_signal(1, channel=1)  # here
    else:
        h.wait_signal(0, channel=0)


@faulty("lost signal", "SignalNotConsumed", ranks=4)
def a_ring_that_is_not_closed():
    _, h = buffer(4)
    h.put_signal((h.rank + 1) % 4)  # here
    if h.rank:
        h.wait_signal(h.rank - 1)


@faulty("lost signal", "Deadlock EarlyReturn", ranks=2)
def both_wait_first():
    _, h = buffer(4)
    h.wait_signal(1 - h.rank)  # here
    h.put_signal(1 - h.rank)


@faulty("lost signal", "ChannelsDiffer", ranks=2)
def the_signal_comes_on_another_channel():
    _, h = buffer(4)
    if h.rank == 0:
        h.put_signal(1, channel=1)  # here
    else:
        h.wait_signal(0, channel=2)  # here


# 10. One word of a pad for two purposes, and barriers that do not meet.


@faulty("pads and channels", "PadReused")
def a_signal_put_three_times():
    _, h = buffer(4)
    if h.rank == 0:
        for _ in range(3):
            h.put_signal(1)  # here
    else:
        h.wait_signal(0)


@faulty("pads and channels", "PadReused")
def a_barrier_between_put_and_wait():
    _, h = buffer(4)
    if h.rank == 0:
        h.put_signal(1)  # here
        h.barrier()
    else:
        h.barrier()  # here
        h.wait_signal(0)


@faulty("pads and channels", "ChannelsDiffer", ranks=3)
def barriers_on_the_ranks_own_channels():
    _, h = buffer(4)
    h.barrier(channel=h.rank)  # here


@faulty("pads and channels", "PadReused")
def an_op_between_put_and_wait():
    mine, h = buffer(4, fill=1)
    if h.rank == 0:
        h.put_signal(1)  # here
        OPS.one_shot_all_reduce(mine, "sum", name())
    else:
        OPS.one_shot_all_reduce(mine, "sum", name())  # here
        h.wait_signal(0)


# Faults that only some orders of the ranks show.


@faulty("only in some orders", RACE, schedules=True)
def a_flag_that_is_looked_at_once():
    mine, h = buffer(4, fill=0)
    h.barrier()
    if h.rank == 0:
        mine.fill_(1)  # here
        flag(h, 1).fill_(1)
    elif flag(h, 1).item() == 0:
        of(h, 0, 4).sum()  # here


@faulty("only in some orders", RACE, schedules=True)
def a_late_rank_skips_its_turn():
    mine, h = buffer(4, fill=0)
    h.barrier()
    if h.rank == 1:
        flag(h, 0).fill_(1)
        mine.sum()  # here
    elif flag(h, 0).item() == 1 and flag(h, 0, 1).item() == 0:
        of(h, 1, 4).fill_(2)  # here


@faulty("only in some orders", RACE, ranks=3, schedules=True)
def the_first_of_two_flags_is_enough():
    _, h = buffer(2, 4)
    if h.rank:
        of(h, 0, 2, 4)[h.rank - 1].fill_(1)  # here
        flag(h, 0, h.rank).fill_(1)
    else:
        until(flag(h, 0, 2), 1)
        if flag(h, 0, 1).item() == 0:
            of(h, 0, 2, 4).sum()  # here
        else:
            until(flag(h, 0, 1), 1)
            of(h, 0, 2, 4).sum()
