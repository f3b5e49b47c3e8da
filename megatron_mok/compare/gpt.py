"""What a GPT training script gives to Megatron 0.19's `pretrain`: data, batches, loss."""

from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

_BATCH_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)


class GPTTask:
    """The callbacks of `pretrain` for plain GPT pretraining.

    Args:
        on_batch: called with each micro-batch's dict of tensors `[micro_batch, sequence]` while
            they are still on the host (training and evaluation; on ranks that read data).
    """

    def __init__(self, on_batch):
        self._on_batch = on_batch

    def datasets(self, num_samples, vp_stage=None):
        """Train, validation and test datasets for `num_samples` = (train, valid, test)."""
        args = get_args()
        blend, blend_per_split = get_blend_and_blend_per_split(args)
        config = GPTDatasetConfig(
            random_seed=args.seed,
            sequence_length=args.seq_length,
            blend=blend,
            blend_per_split=blend_per_split,
            split=args.split,
            path_to_cache=args.data_cache_path,
            tokenizer=build_tokenizer(args),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=args.create_attention_mask_in_dataloader,
        )
        return BlendedMegatronDatasetBuilder(
            GPTDataset, num_samples, lambda: self._reads_data(vp_stage), config
        ).build()

    datasets.is_distributed = True

    def forward_step(self, data_iterator, model):
        """One micro-batch forward; returns (per-token losses `[b, s]`, loss function)."""
        batch = self._next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
        losses_BS = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
        return losses_BS, partial(self._loss, batch["loss_mask"])

    @staticmethod
    def embedding_ranks(pp_ranks):
        """Pipeline ranks that hold the token embedding: the first, and those with MTP layers."""
        args = get_args()
        ranks = {pp_ranks[0]}
        if len(pp_ranks) > 1:
            if not args.untie_embeddings_and_output_weights:
                ranks.add(pp_ranks[-1])
            ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
        return sorted(ranks)

    @staticmethod
    def _has_mtp(vp_stage):
        config = core_transformer_config_from_args(get_args())
        return mtp_on_this_rank(
            layout=config.pipeline_model_parallel_layout,
            mtp_num_layers=config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )

    def _reads_data(self, vp_stage):
        needs_batch = is_first_or_last_pipeline_stage(vp_stage) or self._has_mtp(vp_stage)
        return needs_batch and parallel_state.get_tensor_model_parallel_rank() == 0

    def _next_batch(self, data_iterator, vp_stage):
        args = get_args()
        has_mtp = self._has_mtp(vp_stage)
        if not (is_first_or_last_pipeline_stage(vp_stage) or has_mtp):
            return dict.fromkeys(_BATCH_KEYS)
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        batch = {}
        if tp_rank == 0:
            host_batch = next(data_iterator)
            self._on_batch(host_batch)
            for key in _BATCH_KEYS:
                value = host_batch.get(key)
                batch[key] = None if value is None else value.cuda(non_blocking=True)
        batch = get_batch_on_this_tp_rank(
            batch,
            has_cu_seqlens=False,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
            broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
            broadcast_group=parallel_state.get_tensor_model_parallel_group(),
            cp_size=args.context_parallel_size,
            tp_rank=tp_rank,
            micro_batch_size=args.micro_batch_size,
            seq_length=args.seq_length,
            mtp_on_this_rank=has_mtp,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
            is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
        )
        return get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
        )

    @staticmethod
    def _loss(loss_mask_BS, losses_BS):
        """Sum of the unmasked losses, their number, and both for Megatron's reduction."""
        mask = loss_mask_BS.view(-1).float()
        loss = torch.sum(losses_BS.view(-1).float() * mask)
        num_tokens = mask.sum().detach().to(torch.int)
        if get_args().check_for_nan_in_loss_and_grad:
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=lambda x: ~torch.isfinite(x),
                message="found NaN or Inf in the local loss",
                tolerance=0.0,
                fatal=True,
            )
        report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
        return loss, num_tokens, {"lm loss": report}
