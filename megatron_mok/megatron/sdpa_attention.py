"""Core attention of the local modules: PyTorch's scaled_dot_product_attention in Megatron's
interface."""

import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class SDPACoreAttention(MegatronModule):
    """Causal attention whose query/key and value heads may differ in size, as MLA needs.

    Megatron's own DotProductAttention takes the value head size for that of the query, and keeps
    all scores; Transformer Engine's needs CUDA. Shapes: query `[s, b, n, d_qk]`, key
    `[s, b, g, d_qk]`, value `[s, b, g, d_v]`, output `[s, b, n * d_v]`, where g (the query
    groups of GQA) divides n.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        k_channels=None,
        v_channels=None,
        cp_comm_type=None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError(
                "attention of the local modules does not do context parallelism; set "
                f"context_parallel_size to 1 (given: {config.context_parallel_size})"
            )
        self.softmax_scale = softmax_scale  # None: 1 / sqrt(d_qk)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
    ) -> Tensor:
        if packed_seq_params is not None or attention_bias is not None:
            raise ValueError("attention takes neither packed sequences nor a bias here")
        if attn_mask_type not in (None, AttnMaskType.causal):
            raise ValueError(f"attention is causal only here (given: {attn_mask_type})")
        q_BNSD, k_BGSD, v_BGSV = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out_BNSV = F.scaled_dot_product_attention(
            q_BNSD,
            k_BGSD,
            v_BGSV,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=q_BNSD.shape[1] != k_BGSD.shape[1],
        )
        return out_BNSV.permute(2, 0, 1, 3).flatten(2).contiguous()
