"""docs/flags.md, made of the parser and the tables of refusals.

python -m megatron_mok.megatron.flag_docs > docs/flags.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from megatron_mok.megatron.flags import MODES, add_mok_arguments
from megatron_mok.megatron.rules import ARGS_REFUSALS, CONFIG_REFUSALS, Refusal

_HEAD = """\
# Flags

<!-- Made by `python -m megatron_mok.megatron.flag_docs > docs/flags.md`; a test compares them. -->

## MoK's own

Known where `megatron_mok.megatron.install()` was called, as the launcher does. A YAML configuration
(`--yaml-cfg`) has them at its top, with underscores. In a program, `set_options(MoKOptions(...))`
takes their place.
"""

_LAUNCHER = """\
## The launcher's

    python -m megatron_mok.megatron.launcher [--dry-run[=HOSTSxGPUS]] [--cpu] SCRIPT [ARGUMENT ...]

| flag | meaning |
|---|---|
| `--dry-run` | check a launch and print memory and layout, without GPUs; `=16x8`: 16 hosts of 8 |
| `--cpu` | train on CPU ranks with gloo, to try a script |

## Megatron's that MoK goes by

| flag | what it means for MoK |
|---|---|
| `--moe-token-dispatcher-type mok` | turns it on |
| `--expert-tensor-parallel-size` | must be 1; Megatron's default is the tensor parallel size |
| `--expert-model-parallel-size` | ranks that share memory: at most those of one host |
| `--moe-router-dtype` | any; MoK carries probabilities in FP32, so `fp32` loses nothing |
| `--no-gradient-accumulation-fusion` | weight gradients take the way through FP32 buffers |
| `--distributed-timeout-minutes` | longest wait to enter a layer |
| `--moe-shared-expert-overlap` | no effect, with a warning: the shared expert runs first |
| `--recompute-modules moe_act` | no effect in mode fused, with a warning |
| `--log-interval`, `--moe-per-layer-logging` | when `--mok-log-statistics` logs, and how much |
| `--profile`, with `--use-pytorch-profiler` or `--nvtx-ranges` | MoK's calls are in the trace |
"""

_REFUSED = """\
## Megatron's that MoK refuses

All conflicts of a launch are in one error, when the configuration is made and again when the model
is built. Names are fields of `TransformerConfig`, the last ones Megatron's arguments. Besides
these, an expert-parallel group beyond one host is refused, and sizes that no engine takes: hidden
size, and in mode fused the experts' FFN size, must be multiples of 64; at most 1024 experts and
top-32.
"""


def render() -> str:
    """The text of docs/flags.md."""
    refusals = (*CONFIG_REFUSALS, *ARGS_REFUSALS)
    return "\n".join([_HEAD, *_options(), "", _LAUNCHER, _REFUSED, *_refused(refusals), ""])


def _options() -> Iterable[str]:
    parser = add_mok_arguments(argparse.ArgumentParser(add_help=False))
    yield "| flag | value | default | meaning |"
    yield "|---|---|---|---|"
    for action in parser._actions:
        choices = " or ".join(f"`{choice}`" for choice in action.choices or ())
        if action.nargs == 0:
            value, default = "", "off"
        else:
            value = choices or action.type.__name__
            default = "" if action.default is None else f"`{action.default}`"
        yield f"| `{action.option_strings[0]}` | {value} | {default} | {action.help} |"


def _refused(refusals: Iterable[Refusal]) -> Iterable[str]:
    yield "| setting | refused in mode | why | instead |"
    yield "|---|---|---|---|"
    for rule in refusals:
        modes = "both" if rule.modes == MODES else " ".join(rule.modes)
        yield f"| `{rule.name}` | {modes} | {rule.reason} | {rule.way_out} |"


if __name__ == "__main__":
    print(render(), end="")
