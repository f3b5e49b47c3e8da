"""A comparison's configuration as Megatron's command line."""

from pathlib import Path

from megatron_mok.megatron.local_modules import LOCAL_ARGS

from . import probe
from .config import CompareConfig
from .data import BYTE_VOCAB_SIZE, DataError, Dataset

_FIXED = (
    "--tokenizer-type=NullTokenizer",
    "--expert-tensor-parallel-size=1",
    "--log-interval=1",
    "--ckpt-format=torch_dist",
    # Step 0 is the same weights for all arms; optimizer and RNG states start afresh.
    "--no-save-optim",
    "--no-save-rng",
)


def megatron_args(config: CompareConfig, dataset: Dataset) -> list[str]:
    """Megatron's arguments for every arm of `config`: all of them save the dispatcher's."""
    if config.device == "cpu":
        from megatron_mok.megatron.cpu_mode import MEGATRON_ARGS as device_args
    else:
        device_args = cuda_args()
        if config.parallel.ranks_per_gpu > 1:
            device_args.append("--distributed-backend=gloo")  # NCCL refuses such ranks
    train, parallel = config.train, config.parallel
    args = [
        *_FIXED,
        *device_args,
        *config.model.flags(),
        f"--vocab-size={_vocab_size(config, dataset)}",
        f"--seed={config.seed}",
        f"--data-path={dataset.prefix}",
        f"--data-cache-path={dataset.index_cache}",
        f"--tensor-model-parallel-size={parallel.tensor_model_parallel_size}",
        f"--pipeline-model-parallel-size={parallel.pipeline_model_parallel_size}",
        f"--context-parallel-size={parallel.context_parallel_size}",
        f"--expert-model-parallel-size={parallel.expert_model_parallel_size}",
        f"--distributed-timeout-minutes={parallel.timeout_minutes}",
        *_switch("--sequence-parallel", parallel.sequence_parallel),
        *_switch("--use-distributed-optimizer", parallel.distributed_optimizer),
        *_switch("--overlap-grad-reduce", parallel.overlap_grad_reduce),
        *_switch("--overlap-param-gather", parallel.overlap_param_gather),
        *_switch("--bf16", config.precision == "bf16"),
        *_switch("--deterministic-mode", config.deterministic),
        f"--train-iters={train.steps}",
        f"--micro-batch-size={train.micro_batch_size}",
        f"--global-batch-size={train.global_batch_size}",
        f"--lr={train.lr}",
        f"--min-lr={train.min_lr}",
        f"--lr-decay-style={train.lr_decay_style}",
        f"--lr-warmup-iters={train.lr_warmup_steps}",
        f"--lr-decay-iters={train.steps}",
        f"--weight-decay={train.weight_decay}",
        f"--clip-grad={train.clip_grad}",
        f"--adam-beta1={train.adam_beta1}",
        f"--adam-beta2={train.adam_beta2}",
        *_evaluation(config),
    ]
    if train.recompute_granularity is not None:
        args.append(f"--recompute-granularity={train.recompute_granularity}")
    if train.recompute_granularity == "full":
        args += ["--recompute-method=uniform", "--recompute-num-layers=1"]
    if train.recompute_modules:
        args += ["--recompute-modules", *train.recompute_modules]
    return args + list(config.megatron_args)


def cuda_args() -> list[str]:
    """Megatron's arguments for models on GPUs: Transformer Engine's modules where it is installed,
    else Megatron's local ones."""
    # Both kinds of attention are told that they are causal.
    args = ["--no-create-attention-mask-in-dataloader"]
    if probe.no_transformer_engine():
        args += LOCAL_ARGS
    else:
        args += ["--transformer-impl=transformer_engine", "--moe-permute-fusion"]
    # Megatron's own linear layers, such as the output layer, take this kernel from APEX.
    if probe.no_apex_weight_gradients():
        args.append("--no-gradient-accumulation-fusion")
    return args


def step0_save_args(folder: Path) -> list[str]:
    """Save the initial weights to `folder`."""
    return [f"--save={folder}", "--save-interval=1"]


def step0_load_args(folder: Path) -> list[str]:
    """Start from the weights in `folder` at iteration 0, with fresh optimizer and RNG states."""
    return [f"--load={folder}", "--finetune"]


def _switch(flag: str, on: bool) -> list[str]:
    return [flag] if on else []


def _evaluation(config: CompareConfig) -> list[str]:
    train = config.train
    if train.eval_interval is None:
        return [f"--eval-interval={train.steps + 1}", "--eval-iters=0", "--split=100,0,0"]
    return [
        f"--eval-interval={train.eval_interval}",
        f"--eval-iters={train.eval_iters}",
        f"--split={config.data.split}",
    ]


def _vocab_size(config: CompareConfig, dataset: Dataset) -> int:
    if dataset.is_bytes:
        if config.data.vocab_size not in (None, BYTE_VOCAB_SIZE):
            raise DataError(
                f"data.vocab_size: text is read as bytes, so it must be {BYTE_VOCAB_SIZE} or left "
                f"out (given: {config.data.vocab_size})"
            )
        return BYTE_VOCAB_SIZE
    if config.data.vocab_size is None:
        raise DataError(f"data.vocab_size: missing; the dataset {dataset.prefix} does not say it")
    return config.data.vocab_size
