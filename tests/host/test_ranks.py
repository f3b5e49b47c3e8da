"""The tests' own ranks: their failures, and what they leave behind."""

import gc
import weakref

import pytest

from tests.in_process import run_ranks
from tests.processes import run_processes


def raises(rank, ep_size, port, results):
    if rank == 1:
        raise ValueError("the reason")
    results.put((rank, "done"))


def test_a_process_that_raises_fails_the_test_with_its_traceback():
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 failed:(.|\n)*the reason"):
        run_processes(2, raises)


def test_threads_that_raise_leave_nothing_for_the_garbage_collector():
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)

    def body(rank, thing=thing):
        assert not gc.isenabled()
        raise ValueError(f"rank {rank}")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="rank 0"):
            run_ranks(2, body)
        del thing, body
        assert gone() is None
    finally:
        gc.enable()
    assert run_ranks(2, lambda rank: rank) == [0, 1]
    assert gc.isenabled()
