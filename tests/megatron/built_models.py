"""Builds the model of a launch, as each of its pipeline ranks, and counts its parameters.

A training script for `launcher --cpu`. It prints the numbers that the dry run counts next to those
of the model that Megatron builds. In one process, with the process groups of WORLD_SIZE ranks:
they are PyTorch's fake ones.
"""

import json

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.arguments import (
    core_transformer_config_from_args,
    parse_args,
    validate_args,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_mok.megatron.dry_run.checks import padded_vocabulary
from megatron_mok.megatron.dry_run.parameters import ParameterCounter, Parameters
from megatron_mok.megatron.dry_run.stages import pipeline_stages


def built(config, args, vocab, virtual):
    """[dense, expert] parameters of the chunk that Megatron builds for the current rank."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=virtual)
    mtp = None
    if config.mtp_num_layers:
        layer = get_gpt_decoder_layer_specs(config, use_transformer_engine=False)[-1]
        mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=virtual)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        mtp_block_spec=mtp,
        vocab_size=vocab,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(False, virtual),
        post_process=parallel_state.is_pipeline_last_stage(False, virtual),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=virtual,
    )
    counts = [0, 0]
    for name, parameter in model.named_parameters():
        counts[".experts." in name] += parameter.numel()
    return counts


def main():
    args = parse_args()
    validate_args(args)
    config = core_transformer_config_from_args(args)
    vocab = padded_vocabulary(args)
    sizes = {
        "tp": args.tensor_model_parallel_size,
        "ep": args.expert_model_parallel_size,
        "etp": args.expert_tensor_parallel_size,
    }
    counter = ParameterCounter(config, args, vocab, **sizes)
    virtual_stages = args.virtual_pipeline_model_parallel_size
    rows = []
    for pipeline_rank, stage in enumerate(pipeline_stages(config)):
        rank = pipeline_rank * args.world_size // args.pipeline_model_parallel_size
        torch.distributed.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=args.world_size
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes["tp"],
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual_stages,
            expert_model_parallel_size=sizes["ep"],
            expert_tensor_parallel_size=sizes["etp"],
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(1)
        counted = sum((counter.chunk(chunk) for chunk in stage), Parameters())
        chunks = [
            built(config, args, vocab, virtual if virtual_stages else None)
            for virtual in range(len(stage))
        ]
        rows.append(
            {
                "counted": [counted.dense, counted.experts],
                "built": [sum(counts) for counts in zip(*chunks, strict=True)],
            }
        )
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    groups = [list(group) for group in expert_groups(args)]
    print(json.dumps({"stages": rows, "expert_groups": groups}))


def expert_groups(args):
    """Ranks of each expert-parallel group, as Megatron assigns them."""
    etp, pp = args.expert_tensor_parallel_size, args.pipeline_model_parallel_size
    return parallel_state.RankGenerator(
        tp=etp,
        ep=args.expert_model_parallel_size,
        dp=args.world_size // (etp * args.expert_model_parallel_size * pp),
        pp=pp,
        cp=1,
        order="tp-cp-ep-dp-pp",
    ).get_ranks("tp-ep")


if __name__ == "__main__":
    main()
