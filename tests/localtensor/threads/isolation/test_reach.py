"""What isolation leaves alone: the tables of the standard library that are of all threads."""

import threading

import localtensor as lt

ALIVE = threading._active  # as a debugger in a notebook's kernel names it


def threads_alive():
    return threading.get_ident() in ALIVE


def test_the_table_of_threads_is_one_for_all_ranks_where_a_module_names_it():
    before = set(ALIVE)
    assert lt.run(threads_alive, ranks=3, isolate=True).values == (True, True, True)
    assert set(ALIVE) == before  # else each thread ends with a KeyError, which pytest makes an error of this test
