"""EP ranks as processes of their own."""

import multiprocessing
import os
import queue
import time
import traceback

import pytest


def join_group(rank, ep_size, port):
    """Makes this process a rank of the default process group."""
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ep_size)


class _Failure(str):
    """Traceback of a rank that failed."""


def _reporting(target, rank, ep_size, port, results, *args):
    try:
        target(rank, ep_size, port, results, *args)
    except BaseException:
        results.put((rank, _Failure(traceback.format_exc())))
        raise


def _collect(ranks, results, limit_s=150):
    """What each process of `ranks` put into `results`. Fails as soon as one of them has."""
    parts = {}
    deadline = time.monotonic() + limit_s
    while len(parts) < len(ranks):
        dead = [
            r for r, process in enumerate(ranks) if process.exitcode is not None and r not in parts
        ]
        try:
            rank, part = results.get(timeout=1)
        except queue.Empty:
            if dead:
                pytest.fail(f"ranks {dead} died, exit codes {[ranks[r].exitcode for r in dead]}")
            if time.monotonic() > deadline:
                pytest.fail(f"only ranks {sorted(parts)} answered within {limit_s} s")
            continue
        if isinstance(part, _Failure):
            pytest.fail(f"rank {rank} failed:\n{part}")
        parts[rank] = part
    return parts


def run_processes(ep_size, target, *args):
    """What target(rank, ep_size, port, results, *args) put into `results`, in rank order."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = 29500 + os.getpid() % 1000 + ep_size
    ranks = [
        context.Process(target=_reporting, args=(target, r, ep_size, port, results, *args))
        for r in range(ep_size)
    ]
    for process in ranks:
        process.start()
    try:
        parts = _collect(ranks, results)
        for process in ranks:
            process.join(timeout=30)
        return [parts[r] for r in range(ep_size)]
    finally:
        for process in ranks:
            process.kill()
