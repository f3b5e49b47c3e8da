"""A training script in the manner of Megatron-LM's pretrain_gpt.py. Knows nothing of megatron_mok.

For the `pretrain` of Megatron-Core 0.17, 0.18 and 0.19, which take different arguments. Mock data,
no pipeline or tensor parallelism. Environment:

    SCRIPT_LOSSES   file to which each rank appends `rank iteration loss`, the loss as a hex float
    SCRIPT_DIE_AT   iteration in which every rank kills itself
"""

import inspect
import os
import signal
from functools import partial

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args


def datasets(num_samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        split="100,0,0",
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


datasets.is_distributed = True


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, **kwargs):
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=args.transformer_impl == "transformer_engine"
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        **kwargs,
    )


def loss_func(loss_mask_BS, losses_BS):
    loss = (losses_BS.float() * loss_mask_BS).sum()
    num_tokens = loss_mask_BS.sum().detach().to(torch.int)
    if "SCRIPT_LOSSES" in os.environ:
        iteration = get_args().curr_iteration + 1
        line = f"{torch.distributed.get_rank()} {iteration} {float(loss).hex()}\n"
        with open(os.environ["SCRIPT_LOSSES"], "a") as file:
            file.write(line)
        if str(iteration) == os.environ.get("SCRIPT_DIE_AT"):
            os.killpg(0, signal.SIGKILL)  # the rank and the helpers that write its checkpoints
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(data_iterator, model):
    batch = {name: tensor.cuda() for name, tensor in next(data_iterator).items()}
    losses_BS = model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return losses_BS, partial(loss_func, batch["loss_mask"])


def main():
    kind = ModelType.encoder_or_decoder
    if "cfg_container" not in inspect.signature(pretrain).parameters:  # 0.17
        pretrain(datasets, model_provider, kind, forward_step)
        return
    from megatron.training import argument_utils
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    if hasattr(argument_utils, "gpt_config_from_args"):  # 0.19
        model = argument_utils.gpt_config_from_args(args)
        pretrain(
            argument_utils.pretrain_cfg_container_from_args(args, model),
            datasets,
            kind,
            forward_step,
        )
    else:
        config = argument_utils.pretrain_cfg_container_from_args(args)
        pretrain(config, datasets, model_provider, kind, forward_step)


if __name__ == "__main__":
    main()
