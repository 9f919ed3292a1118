"""`capsys` and `caplog` in ranks: each rank reads its own, and nothing that it leaves unread is lost."""

pytest_plugins = ["pytester"]


def test_capsys_is_of_one_rank(tried):
    result = tried(
        """
        import sys

        @pytest.fixture
        def greeting(rank, capsys):
            print(f"hello {rank}")
            yield capsys.readouterr().out
            print(f"bye {rank}")

        @pytest.mark.ranks(3)
        def test_it(greeting, rank, capsys):
            assert greeting == f"hello {rank}\\n"
            print(f"one {rank}")
            dist.barrier()
            print(f"two {rank}", file=sys.stderr)
            dist.barrier()
            assert capsys.readouterr() == (f"one {rank}\\n", f"two {rank}\\n")
            assert capsys.readouterr() == ("", "")
            print(f"unread {rank}")
            with capsys.disabled():
                print(f"shown {rank}")
        """,
        "-rP", "--rank-schedule", "shuffled:3",
    )  # fmt: skip
    result.assert_outcomes(passed=1)
    shown, _, call = result.stdout.str().partition("Captured stdout call")
    assert all(f"unread {rank}\nbye {rank}\n" in call and f"shown {rank}" in shown for rank in range(3))


def test_capsysbinary_is_of_one_rank_and_capfd_of_all(tried):
    result = tried(
        """
        @pytest.mark.ranks(2)
        def test_bytes(rank, capsysbinary):
            print(rank)
            dist.barrier()
            assert capsysbinary.readouterr().out == f"{rank}\\n".encode()

        @pytest.mark.ranks(2)
        def test_descriptors(rank, capfd):
            print(rank, flush=True)
            dist.barrier()
            if rank == 0:
                assert sorted(capfd.readouterr().out.split()) == ["0", "1"]
            dist.barrier()
        """
    )
    result.assert_outcomes(passed=2)


def test_caplog_is_of_one_rank(tried):
    result = tried(
        """
        import logging

        LOG = logging.getLogger("of.mine")
        HANDLERS = []

        def test_handlers():
            HANDLERS.append(len(logging.getLogger().handlers))

        @pytest.fixture
        def before(caplog):
            caplog.set_level(logging.INFO)
            LOG.info("set up")

        @pytest.mark.ranks(3)
        def test_it(before, rank, caplog):
            with caplog.at_level(logging.DEBUG, "of.mine"):
                LOG.debug("first %d", rank)
                dist.barrier()
                LOG.warning("second %d", rank)
                dist.barrier()
            assert caplog.messages == [f"first {rank}", f"second {rank}"]
            assert caplog.record_tuples[1] == ("of.mine", logging.WARNING, f"second {rank}")
            assert f"second {rank}" in caplog.text and "second" in caplog.text.partition("first")[2]
            assert [record.message for record in caplog.get_records("setup")] == ["set up"]
            assert caplog.get_records("call") == caplog.records
            caplog.clear()
            assert caplog.messages == []

        def test_nothing_is_left_of_it():
            assert [len(logging.getLogger().handlers)] == HANDLERS
            assert LOG.level == logging.NOTSET
        """
    )
    result.assert_outcomes(passed=3)


def test_a_rank_that_is_ended_while_it_waits_leaves_its_output(tried):
    result = tried(
        """
        @pytest.mark.ranks(2)
        def test_it(rank, capsys, caplog):
            print(f"printed {rank}")
            if rank == 0:
                dist.barrier()
        """
    )
    result.assert_outcomes(failed=1)
    assert "printed 0" in result.text and "printed 1" in result.text
