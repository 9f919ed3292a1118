"""The process groups of one simulation at work: a call of one rank becomes its part in a meeting.

The ranks' tensors are read when everybody is there, in the thread of the last; each rank writes its own results
when it goes on.  What goes to the user before that is copied first, and watched until it is waited for.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from localtensor._util.call_sites import handled, origin
from localtensor.collectives.argument_checks import check_message, check_offer, flat
from localtensor.collectives.c10d_table import SEND, Brought, Served
from localtensor.collectives.rendezvous import Compute, Contribution, Group, Ticket, key_of
from localtensor.errors import CollectiveFailed
from localtensor.threads.buffer_watch import Watch
from localtensor.threads.simulation import Simulation

# What an asynchronous collective hands back.


class RankWork(Work):
    """The Work of one rank's part; torch's C++ calls `wait` and `get_future`, Python the rest."""

    def __init__(self, simulation: Simulation, ticket: Ticket, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._simulation = simulation
        self._ticket = ticket
        self.outputs = list(outputs)
        self.settled: Callable[[], None] | None = None  # called once, when it is waited for
        self.waits_left = 1  # a functional collective waits once for each of its outputs
        self.forget: Callable[[], None] | None = None  # called once, when nobody will wait for it again
        self.abandoned = False  # the rank has ended, and torch asks for it once more

    def wait(self, timeout: object = None) -> bool:
        """The collective is over and its outputs hold its result.  A deadlock is found at once: no time limit."""
        simulation, ticket = self._simulation, self._ticket
        self.waits_left -= 1
        if self.waits_left == 0 and self.forget is not None:
            forget, self.forget = self.forget, None  # it knows this work: a circle, else, that only the collector finds
            forget()
        if self.abandoned or (ticket.waited and ticket.deliver is None):
            return True
        simulation.rank()
        settled, self.settled = self.settled, None
        if settled is not None:
            settled()
        simulation.wait(ticket)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Once it says so, the outputs can be used: torch's documentation asks for no wait() after that."""
        done = self._simulation.peek(self._ticket)
        if done:
            self.wait()
        return done

    def is_success(self) -> bool:
        return self._ticket.done

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        self.wait()
        return self.outputs

    def source_rank(self) -> int:
        """The group rank of the sender that a receive has met."""
        self.wait()
        part = self._ticket.part
        return part.group.ranks.index(part.rank if part.peer is None else part.peer)

    _source_rank = source_rank

    def get_future(self) -> "torch.futures.Future[Any]":
        """A future of the outputs.  Python's waits when it is asked; C++, which cannot, gets one that is over."""
        asker = sys._getframe(1).f_code
        future = _LateFuture(self)
        if "get_future" not in asker.co_names:
            future.wait()
        return future


class _LateFuture(torch.futures.Future):
    """Done when its work has been waited for; every question waits."""

    def __init__(self, work: RankWork) -> None:
        super().__init__()
        self._work: RankWork | None = work

    def settle(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self.set_result(work.result())

    def wait(self) -> Any:
        self.settle()
        return super().wait()

    def value(self) -> Any:
        self.settle()
        return super().value()

    def done(self) -> bool:
        if self._work is not None and self._work.is_completed():
            self.settle()
        return super().done()

    def then(self, callback: Any) -> Any:
        self.settle()
        return super().then(callback)

    def add_done_callback(self, callback: Any) -> None:
        self.settle()
        super().add_done_callback(callback)


c10d_cpp: Any = torch._C._distributed_c10d  # its stubs lag behind


def _over() -> Any:
    """A Work that is over, as the dispatcher carries it."""
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return c10d_cpp._create_work_from_future(future).boxed()


class Kernels:
    """The kernels of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.watches = [Watch(simulation) for _ in range(simulation.ranks)]
        # Of each rank, because C++ does not keep the Python side of a Work alive.
        self.kept: list[dict[RankWork, None]] = [{} for _ in range(simulation.ranks)]
        self.over = _over()

    def part(self, served: Served, brought: Brought, rank: int, group: Group) -> tuple[Contribution, bool]:
        """The rank's part in a collective, and whether its Work goes to the user."""
        line, hands_out = origin(sys._getframe(2))
        compared = brought.writes if served.by_output else list(flat(brought.reads))
        tensors = tuple([(x.dtype, x.shape) for x in compared])
        device = compared[0].device if compared else None
        root = None if brought.root is None else group.ranks[brought.root]
        layout = _layout(compared) if served.in_place else None
        key = key_of(served.kind.removesuffix("_coalesced"), tensors, device, brought.op, root, served.alike, layout)
        part = Contribution(
            rank,
            served.kind,
            group,
            brought.reads,
            tensors,
            device,
            key,
            op=brought.op,
            root=root,
            input_splits=brought.input_splits,
            output_splits=brought.output_splits,
            line=line,
            layout=layout,
            handling=handled(),
        )
        _settle(device)
        return part, hands_out

    def collective(self, served: Served, group: Group, arguments: Sequence[Any], *, later: bool) -> Any:
        """What the op returns, with its Work."""
        simulation = self.simulation
        rank = simulation.rank()
        meant, brought = served.brings(arguments)
        check_offer(meant.kind, brought, rank, group.ranks)
        part, hands_out = self.part(meant, brought, rank, group)
        hands_out = hands_out and later
        read = list(flat(brought.reads)) if hands_out else ()
        if hands_out:  # the user may write it before the others have come
            part.inputs = _copied(brought.reads)

        def deliver(results: Sequence[Tensor]) -> None:
            self.write(part, brought.writes, results)

        ticket = simulation.meet(part, _plainly(meant.compute), deliver, hands_out=hands_out)
        if not later:
            simulation.wait(ticket)
            return self.answer(served, arguments, self.over)
        work = self.work(rank, ticket, brought.writes, read if hands_out else None, sends=_only_sends(part))
        simulation.baton.pause(rank)
        return self.answer(served, arguments, work.boxed())

    def work(
        self, rank: int, ticket: Any, writes: Sequence[Tensor], read: Sequence[Tensor] | None, *, sends: bool = False
    ) -> RankWork:
        """The Work of this part; if `read` is not None, its buffers are watched until it is waited for.

        What a rank only `sends` may be read meanwhile, even where it is called an output.
        """
        work = RankWork(self.simulation, ticket, writes)
        self.kept[rank][work] = None
        watch = self.watches[rank]
        if read is not None:
            outputs = [] if sends else writes
            written = {id(x) for x in outputs}
            watch.begin(ticket, [x for x in read if id(x) not in written], outputs)

        # C++ that finds the Python side gone waits for ever: a functional collective waits once for each output.
        functional = read is None or sys._getframe(3).f_code.co_filename == torch._ops.__file__
        work.waits_left = max(len(writes), 1) if functional else 1
        work.forget = functools.partial(self.kept[rank].pop, work, None)
        work.settled = functools.partial(watch.end, ticket)
        return work

    def leave(self, rank: int) -> None:
        """The rank has ended: nothing of it is left in torch's registry of functional collectives to be waited for."""
        self.watches[rank].close()
        for work in list(self.kept[rank]):
            work.abandoned = True
            for output in work.outputs:
                torch.ops._c10d_functional.wait_tensor(output)
        self.kept[rank].clear()

    def write(self, part: Contribution, buffers: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """The buffers hold the results; autograd and modes do not notice, as they would not on a real backend."""
        with (
            torch._C._AutoDispatchBelowADInplaceOrView(),
            torch._C._DisableTorchDispatch(),
            torch._C.DisableTorchFunction(),
        ):
            for index, (buffer, result) in enumerate(zip(buffers, results)):
                if buffer.numel() != result.numel() or buffer.dtype != result.dtype:
                    got, want = f"{tuple(buffer.shape)} of {buffer.dtype}", f"{tuple(result.shape)} of {result.dtype}"
                    detail = f"rank {part.rank} offers a buffer of shape {got} for a result of shape {want}"
                    calls = [part.call()]
                    if part.kind == "all_to_all":  # the result is what one other rank has brought
                        sender = part.group.ranks[index]
                        detail += f", which rank {sender} sends"
                        calls += [] if sender == part.rank else self.simulation.parts_like(part, sender)
                    self.simulation.fail(CollectiveFailed(calls, detail))
                buffer.copy_(result if buffer.shape == result.shape else result.view(buffer.shape))
            _settle(buffers[0].device if buffers else None)

    def answer(self, served: Served, arguments: Sequence[Any], work: Any) -> Any:
        if served.kind == "monitored_barrier":
            return None
        return work if served.returns is None else (arguments[served.returns], work)

    def message(self, name: str, group: Group, tensors: list[Tensor], peer: int | None, tag: int) -> Any:
        """A send or receive is posted: its Work."""
        simulation = self.simulation
        rank = simulation.rank()
        line, hands_out = origin(sys._getframe(2))
        sends = name == SEND
        check_message("send" if sends else "recv", tensors, peer, tag, len(group.ranks))
        inputs = [x.detach().clone() for x in tensors] if sends else None
        signature = tuple([(x.dtype, x.shape) for x in tensors])
        part = Contribution(
            rank, "send" if sends else "recv", group, inputs, signature, tensors[0].device, line=line, tag=tag
        )
        part.handling = handled()
        _settle(part.device)
        part.peer = None if peer is None else group.ranks[peer]
        if sends:
            ticket = simulation.send(part)
        else:
            ticket = simulation.recv(part, lambda results: self.write(part, tensors, results))
        work = self.work(rank, ticket, [] if sends else tensors, (tensors if sends else []) if hands_out else None)
        simulation.baton.pause(rank)
        return work.boxed()


def _only_sends(part: Contribution) -> bool:
    """The root of a broadcast holds already what the others get."""
    return part.kind == "broadcast" and part.rank == part.root


@functools.cache
def _plainly(compute: Compute) -> Compute:
    """The same arithmetic, in the tensors' own dtype and without a record for autograd, whoever comes last."""

    def plain(parts: Sequence[Contribution]) -> Sequence[Any]:
        with torch._C._DisableAutocast(), torch.no_grad():
            results = compute(_on_one_device(parts))
        _settle(parts[0].device)
        return results

    return plain


def _settle(device: torch.device | None) -> None:
    """What this rank has asked of its GPU is done: another rank, on another stream, reads it next."""
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _on_one_device(parts: Sequence[Contribution]) -> Sequence[Contribution]:
    """Ranks with a GPU each bring their tensors to the first one's; each copies its own result back."""
    devices = {part.device for part in parts if part.device is not None}
    if len(devices) > 1:
        for part in parts:
            part.inputs = _moved(part.inputs, parts[0].device)
    return parts


def _moved(reads: Any, device: torch.device | None) -> Any:
    return reads.to(device) if isinstance(reads, Tensor) else [_moved(each, device) for each in reads]


def _layout(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...] | None:
    """How the elements lie in memory; None if just as they are counted."""
    return None if all(x.is_contiguous() for x in tensors) else tuple(x.stride() for x in tensors)


def _copied(reads: Any) -> Any:
    return reads.detach().clone() if isinstance(reads, Tensor) else [_copied(each) for each in reads]
