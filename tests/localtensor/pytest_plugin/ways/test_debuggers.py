"""Debuggers: a breakpoint stops in the rank that meets it, and --pdb opens where the rank failed."""

import os
import select
import subprocess
import time

import pytest

pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")

RANKS = """
    @pytest.mark.ranks(4)
    def test_stops(rank):
        total = torch.tensor(rank)
        if rank == 3:
            breakpoint()
        dist.all_reduce(total)
        assert total == 6

    @pytest.mark.ranks(3)
    def test_fails(rank):
        mine = f"only on {rank}"
        dist.barrier()
        if rank == 1:
            raise ValueError(mine)
"""
LIMIT = 2.0  # seconds that the ranks have, unless somebody debugs them


class Terminal:
    """A session as in a terminal, where somebody waits for a prompt and types."""

    def __init__(self, session, *options):
        self.said, self.read = "", 0
        ours, theirs = pty.openpty()
        self.ours = ours
        environ = {**session.environ, "TERM": "dumb", "PYTHON_BASIC_REPL": "1"}
        self.process = subprocess.Popen(
            session.command(*options), cwd=session.folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)

    def until(self, words, patience=90.0):
        """What was said up to these words; the test fails if they do not come."""
        end = time.monotonic() + patience
        while (found := self.said.find(words, self.read)) < 0:
            ready, _, _ = select.select([self.ours], [], [], max(0.0, end - time.monotonic()))
            try:
                more = os.read(self.ours, 4096) if ready else b""
            except OSError:  # the other side has gone
                more = b""
            if not more:
                pytest.fail(f"waited for {words!r}, and this is what came:\n{self.said}")
            self.said += more.decode(errors="replace").replace("\r\n", "\n")
        before, self.read = self.said[self.read : found], found + len(words)
        return before

    def types(self, line):
        os.write(self.ours, f"{line}\n".encode())
        self.until(line)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


@pytest.fixture
def terminal(session):
    session.write(RANKS)
    opened = Terminal(session, "--pdb", "-p", "no:randomly", "--rank-timeout", str(LIMIT))
    yield opened
    opened.close()


@pytest.mark.slow
def test_a_breakpoint_stops_in_its_rank_while_time_does_not_count_and_post_mortem_opens_there(terminal):
    terminal.until("(Pdb)")
    terminal.types("p rank, total")
    assert terminal.until("(Pdb)").strip() == "(3, tensor(3))"
    terminal.types(f"import time; time.sleep({1.2 * LIMIT})")
    terminal.until("(Pdb)")
    terminal.types("c")
    before = terminal.until("(Pdb)")  # of the second test, post mortem
    assert "ValueError: only on 1" in before and "First cause: rank 1 of 3" in before
    terminal.types("p rank, mine")
    assert terminal.until("(Pdb)").strip() == "(1, 'only on 1')"
    terminal.types("q")
    terminal.until("1 failed, 1 passed")
    assert "Timeout" not in terminal.said and "NeverEnded" not in terminal.said
    assert terminal.process.wait(60) == 2  # as any session that a debugger has ended
