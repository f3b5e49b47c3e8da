"""Megatron's local modules in place of Transformer Engine's, on either device."""

LOCAL_ARGS = (
    "--transformer-impl=local",
    "--attention-backend=unfused",
    "--no-persist-layer-norm",  # apex only
    "--no-masked-softmax-fusion",  # a CUDA extension of apex
    "--no-rope-fusion",  # Transformer Engine only
)
"""Megatron command-line arguments for models of local modules, without Transformer Engine or
apex."""


def use_sdpa_attention() -> None:
    """Let local modules attend with PyTorch's scaled_dot_product_attention, in this process.

    Call it before the model is built. Reaches decoder and MTP layers alike.
    """
    from megatron.core.models import backends

    from .sdpa_attention import SDPACoreAttention

    backends.LocalSpecProvider.core_attention = lambda self: SDPACoreAttention
