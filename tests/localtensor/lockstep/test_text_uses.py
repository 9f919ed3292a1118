"""The text of an int of each rank may be shown; what compares it, or looks something up by it, is refused."""

import sys

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors import NotInLockstep

TABLE = {"0": 1, "rank1": 2}

COMPUTES = {
    "str(r) == '0'": lambda r: str(r) == "0",
    "f'rank{r}' in": lambda r: f"rank{r}" in ("rank0", "rank1"),
    "'rank1' in (": lambda r: "rank1" in (f"rank{r}", "all"),
    "TABLE.get(": lambda r: TABLE.get(f"{r}", 0),
    "TABLE[f'": lambda r: TABLE[f"rank{r}"],
    "{f'rank{r}': 1}": lambda r: {f"rank{r}": 1},
    "len(str(r))": lambda r: len(str(r)),
    "int(str(r))": lambda r: int(str(r)),
    "'%s' % r == '2'": lambda r: "%s" % r == "2",  # noqa: UP031  # what is tested
    "'{}'.format(r)": lambda r: "{}".format(r).startswith("2"),  # noqa: UP032  # what is tested
    "name.endswith": lambda r: [name for name in TABLE if name.endswith(str(r))],
    "repr(r > 1)": lambda r: repr(r > 1) == "True",
}

SHOWS = {
    "an argument": lambda r: print(f"rank {r} of", str(r), repr(r)),
    "a list of texts": lambda r: len([f"{each}" for each in (r, r + 1)]),
    "a longer text": lambda r: ", ".join([f"rank {r}".upper(), "%s" % r]),  # noqa: UP031  # what is tested
    "a text that is kept": lambda r: dict(text=f"rank {r}"),  # noqa: C408  # a call that keeps it
    "a value": lambda r: {"rank": f"{r}"},
    "what is known": lambda r: str(r) == "RankInts(0, 1, 2)",
    "another text": lambda r: TABLE.get("0" if f"{dist.get_world_size()}" else "", 0),
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python tells the columns of what runs since 3.11")
@pytest.mark.parametrize("words", COMPUTES)
def test_computing_with_the_text_is_refused(words):
    with pytest.raises(NotInLockstep, match="it would be another text on each rank") as found, lt.LocalTensorMode(3):
        COMPUTES[words](dist.get_rank())
    assert words in str(found.value)
    assert "RankInts(0, 1, 2)" in str(found.value) or "RankBools" in str(found.value)


@pytest.mark.parametrize("name", SHOWS)
def test_showing_it_is_not(name, capsys):
    with lt.LocalTensorMode(3):
        SHOWS[name](dist.get_rank())
    assert "RankInts(0, 1, 2)" in capsys.readouterr().out or name != "an argument"


def test_an_error_may_quote_it():
    def fails(rank):
        if rank >= 0:
            raise KeyError(f"rank {rank}")

    with pytest.raises(KeyError, match=r"rank RankInts\(0, 1\)"), lt.LocalTensorMode(2):
        fails(dist.get_rank())


def test_the_text_of_the_ranks_that_run_is_theirs():
    with lt.LocalTensorMode(3):
        rank, found = dist.get_rank(), torch.zeros(1)
        if rank == 1:
            found = torch.ones(1) * (str(rank) == "1")
    assert [found.on(each).item() for each in range(3)] == [0, 1, 0]
