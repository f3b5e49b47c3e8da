"""`megatron-mok flags`."""

import argparse
import sys
from pathlib import Path

from megatron_mok.models import MODELS, ConfigError, ModelConfig, load_model

_DESCRIPTION = """\
Print a model as Megatron's command-line flags, one a line, for launch scripts:

  mapfile -t MODEL_ARGS < <(megatron-mok flags deepseek_v3 --arm mok)
  torchrun ... pretrain_gpt.py "${MODEL_ARGS[@]}" ...
"""


def _epilog() -> str:
    from megatron_mok.compare.arms import ARMS

    arms = "\n".join(f"  {name:<14}{' '.join(arm.flags)}" for name, arm in ARMS.items())
    return f"""\
models (hyperparameters and their sources: {Path(__file__).parents[1] / "models"}):
  {", ".join(MODELS)}

arms:
{arms}

exit status: 0 printed; 2 wrong arguments
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "flags",
        help="print a known model as Megatron's flags",
        description=_DESCRIPTION,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="name of a known model, or YAML file of a comparison"
    )
    parser.add_argument("--arm", metavar="ARM", help="add the flags of this dispatcher")
    parser.add_argument(
        "--tp",
        metavar="N",
        type=int,
        default=1,
        help="tensor parallel size: the embedding gets the model's number of rows by way of "
        "--make-vocab-size-divisible-by, whatever the tokenizer's size is (default: 1)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the flags that `args` ask for; returns the exit status."""
    try:
        flags = [*_model_flags(_model(args.model), args.tp), *_arm_flags(args.arm)]
    except ConfigError as error:
        print(f"megatron-mok flags: {error}", file=sys.stderr)
        return 2
    print("\n".join(flags))
    return 0


def _model(name: str) -> ModelConfig:
    if not name.endswith((".yaml", ".yml")):
        return load_model(name)
    from megatron_mok.compare.config import load

    try:
        return load(Path(name)).model
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _model_flags(model: ModelConfig, tp: int) -> list[str]:
    rows = model.vocab_size
    if rows is None:
        return model.flags()
    if tp < 1 or rows % tp:
        raise ConfigError(f"--tp {tp}: does not divide the model's vocabulary of {rows} rows")
    # Megatron pads the tokenizer's size to a multiple of this times the tensor parallel size.
    return [*model.flags(), f"--vocab-size={rows}", f"--make-vocab-size-divisible-by={rows // tp}"]


def _arm_flags(name: str | None) -> tuple[str, ...]:
    from megatron_mok.compare.arms import ARMS

    if name is None:
        return ()
    if name not in ARMS:
        raise ConfigError(f"--arm: {name!r} is not known; allowed are {', '.join(ARMS)}")
    return ARMS[name].flags
