"""Routes as lists of expert ids, from the dense maps that Megatron's router returns."""

import torch


def routes_from_map(
    probs_TE: torch.Tensor, routing_map_TE: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns a routing map into lists of routes, without a host synchronisation on a GPU.

    The map alone decides which experts a token goes to: its probabilities may tie or be 0.

    Args:
        probs_TE: [T, E] any floating dtype; differentiable.
        routing_map_TE: [T, E] bool, at most `topk` true in a row.
        topk: K.

    Returns:
        expert_ids_TK: [T, K] int32, ascending, then -1 where a token has fewer than K routes.
        probs_TK: [T, K] of the dtype of `probs_TE`, 0 where there is no route.

    Raises:
        ValueError: shapes do not fit; on the CPU also when a token has more than `topk` routes.
    """
    if probs_TE.dim() != 2 or probs_TE.shape != routing_map_TE.shape:
        raise ValueError(
            f"probs {list(probs_TE.shape)} and routing_map {list(routing_map_TE.shape)} must "
            "have the same shape [T, E]"
        )
    tokens, num_experts = probs_TE.shape
    # A check that reads values would split a compiled graph.
    if routing_map_TE.device.type == "cpu" and tokens and not torch.compiler.is_compiling():
        most = int(routing_map_TE.sum(dim=1).max())
        if most > topk:
            raise ValueError(f"a token has {most} routes; topk is {topk}")
    # Largest keys first are smallest experts first; 0 is no route.
    descending_E = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=probs_TE.device)
    keys_TE = torch.where(routing_map_TE, descending_E, 0)
    keys_TK = keys_TE.topk(min(topk, num_experts), dim=1, sorted=True).values
    if topk > num_experts:
        keys_TK = torch.nn.functional.pad(keys_TK, (0, topk - num_experts))
    is_route_TK = keys_TK > 0
    expert_ids_TK = torch.where(is_route_TK, num_experts - keys_TK, -1).to(torch.int32)
    gathered_TK = probs_TE.gather(1, expert_ids_TK.clamp(min=0).long())
    return expert_ids_TK, torch.where(is_route_TK, gathered_TK, 0)
