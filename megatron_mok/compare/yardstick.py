"""The yardstick of loss differences: a run whose experts start one ulp away.

Two correct implementations of the same layer round differently, and training amplifies that. How
much, the first arm shows against itself when its expert weights start a last place apart.
"""

import torch

_SAME_SIZE = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def arm_name(first: str) -> str:
    """What the yardstick run of the arm `first` is called."""
    return f"{first} +1 ulp"


def is_expert(name: str) -> bool:
    """Whether a parameter of this name belongs to a routed expert."""
    return ".experts." in name


def move_by_one_ulp(model_chunks, optimizer) -> None:
    """Move every weight of every routed expert away from zero, by one unit in the last place.

    Args:
        model_chunks: the list of model chunks of this rank; changed in place.
        optimizer: Megatron's optimizer of them; its own copies of the weights follow.
    """
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            if is_expert(name):
                # The integer behind sign and magnitude: the next one is the next number.
                parameter.data.view(_SAME_SIZE[parameter.dtype]).add_(1)
    optimizer.reload_model_params()
