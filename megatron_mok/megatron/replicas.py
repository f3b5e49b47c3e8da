"""Hashes of a model's parameters, and the check that data-parallel replicas hold the same ones."""

import hashlib

import torch
from megatron.core import parallel_state


def hash_tensor(tensor: torch.Tensor) -> str:
    """Hex SHA-256 of a tensor's bytes (any dtype and device; one copy to the host)."""
    data = tensor.detach().contiguous().cpu().view(torch.uint8).reshape(-1)
    return hashlib.sha256(data.numpy()).hexdigest()


def parameter_hashes(model_chunks) -> dict[str, str]:
    """Hash of every parameter on this rank, by `chunk.name`.

    A parameter that a module shares under two names is listed once, under the first.
    """
    return {
        f"{i}.{name}": hash_tensor(param)
        for i, chunk in enumerate(model_chunks)
        for name, param in chunk.named_parameters()
    }


def assert_replicas_equal(model_chunks, when: str) -> dict[str, str]:
    """Check that all replicas of each parameter are bitwise equal; a collective over all ranks.

    Expert parameters (`allreduce` False) are compared over the expert data-parallel group, all
    others over the data-parallel group with context parallelism. Unequal replicas train on
    without an error, so look before the first step and after the last.

    Args:
        model_chunks: the list of model chunks that Megatron's training loop passes around.
        when: what to say in the error, such as "before step 1".

    Returns:
        `parameter_hashes(model_chunks)`.

    Raises:
        RuntimeError: on every rank of a group that disagrees; names the first such parameter.
    """
    hashes = parameter_hashes(model_chunks)
    expert = {
        f"{i}.{name}"
        for i, chunk in enumerate(model_chunks)
        for name, param in chunk.named_parameters()
        if not getattr(param, "allreduce", True)
    }
    groups = (
        (parallel_state.get_data_parallel_group(with_context_parallel=True), False),
        (parallel_state.get_expert_data_parallel_group(), True),
    )
    for group, is_expert in groups:
        mine = {name: h for name, h in hashes.items() if (name in expert) == is_expert}
        all_hashes = [None] * group.size()
        torch.distributed.all_gather_object(all_hashes, mine, group=group)
        for rank, theirs in enumerate(all_hashes):
            if theirs != mine:
                names = mine.keys() | theirs.keys()
                differing = sorted(n for n in names if mine.get(n) != theirs.get(n))
                ranks = torch.distributed.get_process_group_ranks(group)
                raise RuntimeError(
                    f"{'expert ' if is_expert else ''}data-parallel replicas differ {when}: "
                    f"{len(differing)} of {len(mine)} parameters, first {differing[0]!r}, between "
                    f"rank {torch.distributed.get_rank()} and rank {ranks[rank]}"
                )
    return hashes
