"""Routes drawn at random, as a router would return them."""

import torch

ZIPF_EXPONENT = 1.0
"""The r-th most popular expert of a `zipf` routing has popularity r ** -ZIPF_EXPONENT. With 32
experts and 8 routes the busiest one gets about 3.7 times the mean load."""


def draw_routes(
    routing: str, tokens: int, experts: int, topk: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes of `tokens` tokens to `topk` distinct experts each.

    A token draws its experts one after the other in proportion to their popularity, without
    replacement (the largest of log popularity plus Gumbel noise).

    Args:
        routing: "uniform", all experts equally popular; "zipf", see `ZIPF_EXPONENT`, with the ranks
            of popularity shuffled over the experts.
        seed: the same seed gives the same routes on every machine: they are drawn on the CPU.

    Returns:
        probs_TE: [T, E] float32, a softmax over each token's routes, 0 elsewhere.
        routing_map_TE: [T, E] bool.
    """
    generator = torch.Generator().manual_seed(seed)
    if routing == "uniform":
        log_popularity_E = torch.zeros(experts)
    elif routing == "zipf":
        rank_E = 1 + torch.randperm(experts, generator=generator)
        log_popularity_E = -ZIPF_EXPONENT * rank_E.float().log()
    else:
        raise ValueError(f"routing is {routing!r}; allowed are uniform and zipf")
    exponential_TE = torch.empty(tokens, experts).exponential_(generator=generator)
    keys_TE = log_popularity_E - exponential_TE.log()
    ids_TK = keys_TE.topk(topk, dim=1).indices
    routing_map_TE = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, ids_TK, True)
    logits_TE = torch.randn(tokens, experts, generator=generator)
    probs_TE = logits_TE.masked_fill(~routing_map_TE, float("-inf")).softmax(dim=1)
    return probs_TE, routing_map_TE
