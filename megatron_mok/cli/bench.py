"""`megatron-mok bench`."""

import argparse
import difflib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from megatron_mok.bench.arms import ARMS, engine_arm
from megatron_mok.bench.config import DEVICES, DIRECTIONS, DTYPES, ROUTINGS
from megatron_mok.bench.presets import PRESETS

_DESCRIPTION = """\
Time one MoE layer, from (hidden states, probs, routing map) to output, in several implementations
on one device, and compare them with the rate of a dense matrix product.

The schedule is in the time, the router is not. Every arm gets the same random inputs, and its
results are checked against a reference in higher precision before it is timed. Launches are timed
in blocks in random order, the dense product among them, because a power-limited GPU runs at a rate
that depends on what ran just before.
"""


def _epilog() -> str:
    presets = "\n".join(
        f"  {p.name:<12}H {p.hidden:<5}F {p.ffn:<5}{p.experts:>3} of {p.model_experts:<4}experts, "
        f"top-{p.topk}, {p.tokens} tokens; {p.source}"
        for p in PRESETS.values()
    )
    arms = "\n".join(f"  {arm.name:<21}{arm.summary}" for arm in ARMS.values())
    return f"""\
presets (the experts that one rank has at EP 8, or at EP 1; all routes of the tokens go to them):
{presets}

arms:
{arms}

routings:
  uniform  K distinct experts, all equally likely
  zipf     the r-th most popular expert has popularity 1/r (exponent 1)

directions:
  forward   a training forward, which keeps what backward needs
  backward  the backward alone, after an untimed forward; gradients of hidden states, probs and
            weights. mok and megatron_te_alltoall add the weights' to FP32 main_grad, the torch
            arms return them in the weights' dtype and are spared that
  both      one forward and its backward
  dispatch  from hidden states, probs and routing map to rows by expert, without gradients
  combine   from those rows to sums by token, likewise; mok's includes its schedule

TFLOP/s count the routed experts only: 6 T K H F forward, 12 T K H F backward, 18 T K H F both, for
T tokens, K routes, hidden size H, expert FFN size F. "of dense" is their ratio to the median rate
of an 8192^3 torch.matmul in the same dtype (1024^3 on a CPU) over the whole run. GB/s of dispatch
and combine count each token once and each of its rows once. Of forwards on a GPU the results also
have the memory that each keeps for its backward, the output not counted, and of mok's the time of
the schedule, from the start of its first kernel to the end of its last.

An arm whose software is missing is a row that says so; so is one whose relative error is above
1e-2 in bf16 or 1e-4 in fp32.

examples:
  megatron-mok bench
  megatron-mok bench --preset deepseek_v3,qwen3_30b --routing uniform,zipf --direction forward,both
  megatron-mok bench --preset deepseek_v3 --tokens 512,1024,2048,4096,8192 --json ds.json
  megatron-mok bench --device cpu --arms mok,torch_eager
  megatron-mok bench --arms mok --engine before=/tmp/before/libmok_cuda.so --direction both

exit status: 0 every arm that can run here passed and was timed; 1 an arm failed, or a required arm
cannot run; 2 wrong arguments; 130 interrupted
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time one MoE layer against other implementations",
        description=_DESCRIPTION,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to run (lists are comma-separated)")
    what.add_argument(
        "--preset",
        metavar="P,Q",
        action="extend",
        type=_names(PRESETS),
        help="layers to time; may be given several times (default: deepseek_v3, on a CPU tiny)",
    )
    what.add_argument(
        "--tokens", metavar="N,M", type=_tokens, help="numbers of tokens (default: the preset's)"
    )
    what.add_argument(
        "--routing",
        metavar="R,S",
        type=_names(ROUTINGS),
        default=["uniform"],
        help="uniform, zipf (default: uniform)",
    )
    what.add_argument(
        "--direction",
        metavar="D,E",
        type=_names(DIRECTIONS),
        default=["forward"],
        help="forward, backward, both, dispatch, combine (default: forward)",
    )
    what.add_argument(
        "--arms",
        metavar="A,B",
        type=_names(ARMS),
        default=list(ARMS),
        help="implementations to time, in the order to show them (default: all)",
    )
    what.add_argument(
        "--engine",
        metavar="NAME=FILE",
        action="append",
        type=_engine,
        default=[],
        help="time mok with another build of its engine, too (libmok_cuda.so, on a CPU "
        "libmok_host.so), as the arm NAME; may be given several times",
    )
    what.add_argument(
        "--require",
        metavar="A,B",
        action="extend",
        type=_names(ARMS),
        default=[],
        help="of the arms, those whose absence is an error (always one: those of --engine)",
    )
    what.add_argument(
        "--device",
        choices=DEVICES,
        default="cuda",
        help="cuda is the current CUDA device; cpu is for trying the command (default: cuda)",
    )
    what.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bf16",
        help="of hidden states, weights and activations (default: bf16)",
    )
    what.add_argument(
        "--seed",
        metavar="N",
        type=_integer(0),
        default=1,
        help="of inputs, routes and the order of blocks (default: 1)",
    )
    timing = parser.add_argument_group("timing")
    timing.add_argument(
        "--warmup-s",
        metavar="S",
        type=_seconds(0.0),
        default=0.2,
        help="seconds of untimed launches at the start of a block (default: 0.2)",
    )
    timing.add_argument(
        "--time-s",
        metavar="S",
        type=_seconds(0.001),
        default=0.3,
        help="seconds of timed launches in a block, at least 3 launches (default: 0.3)",
    )
    timing.add_argument(
        "--repeats",
        metavar="N",
        type=_integer(1),
        default=5,
        help="blocks per arm and direction (default: 5)",
    )
    output = parser.add_argument_group("output besides the tables")
    output.add_argument(
        "--json",
        metavar="FILE",
        type=_output_file(""),
        help="results file, written after each case; its commit is the environment "
        "variable MOK_COMMIT, or git's",
    )
    output.add_argument(
        "--plot",
        metavar="FILE.png",
        type=_output_file(".png"),
        help="bar chart of the fractions of the dense rate",
    )
    parser.set_defaults(run=lambda args: run(parser, args))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Run the benchmark that `args` ask for; returns the exit status."""
    _check(parser, args)
    from rich.console import Console

    from megatron_mok.bench.config import BenchConfig, TimingOptions
    from megatron_mok.bench.report import print_report, write_json
    from megatron_mok.bench.runner import RequiredArmError, run_benchmark
    from megatron_mok.results import command_line

    presets = args.preset or ["deepseek_v3" if args.device == "cuda" else "tiny"]
    config = BenchConfig(
        presets=tuple(PRESETS[name] for name in presets),
        tokens=tuple(args.tokens) if args.tokens else None,
        routings=tuple(args.routing),
        directions=tuple(args.direction),
        arms=(
            *(ARMS[name] for name in args.arms),
            *(engine_arm(name, library) for name, library in args.engine),
        ),
        require=(*args.require, *(name for name, _ in args.engine)),
        device=args.device,
        dtype=args.dtype,
        seed=args.seed,
        timing=TimingOptions(args.warmup_s, args.time_s, args.repeats, args.seed),
    )
    command = command_line()

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def write_results(report) -> None:
        if args.json is not None:
            write_json(args.json, command, report)

    try:
        report = run_benchmark(config, progress, case_done=write_results)
    except RequiredArmError as error:
        print(f"megatron-mok bench: {error}", file=sys.stderr)
        return 1
    if args.plot is not None:
        from megatron_mok.bench.plot import write_chart

        if not write_chart(args.plot, report):
            print(f"{args.plot} not written: nothing was timed", file=sys.stderr)
    print_report(Console(), report)
    return 1 if report.failed else 0


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What single arguments cannot know. Ends the program with a message where it is wrong."""
    for option, names in (
        ("--preset", args.preset or []),
        ("--require", args.require),
        ("--engine", [name for name, _ in args.engine]),
    ):
        for name in names:
            if names.count(name) > 1:
                parser.error(f"argument {option}: {name} is named twice")
    for name in args.require:
        if name not in args.arms:
            parser.error(
                f"argument --require: {name} is not among the arms to run "
                f"({', '.join(args.arms)}); add it to --arms"
            )
    for module, needed in (("rich", True), ("matplotlib", args.plot is not None)):
        if needed and importlib.util.find_spec(module) is None:
            parser.error(f"the Python package {module} is not installed: pip install {module}")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "argument --device: PyTorch sees no CUDA device; --device cpu runs the command on the "
            "CPU, where times say nothing about GPUs"
        )


def _names(allowed: Collection[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in allowed:
                close = difflib.get_close_matches(name, allowed, n=1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise argparse.ArgumentTypeError(
                    f"{name!r} is not known; {hint}allowed are {', '.join(allowed)}"
                )
            if names.count(name) > 1:
                raise argparse.ArgumentTypeError(f"{name} is named twice in {text!r}")
        return names

    return parse


def _engine(text: str) -> tuple[str, Path]:
    name, _, file = text.partition("=")
    if not name or not file or name in ARMS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=FILE with a NAME that no arm has ({', '.join(ARMS)})"
        )
    if not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {file!r}")
    return name, Path(file)


def _tokens(text: str) -> list[int]:
    numbers = [_integer(1)(part.strip()) for part in text.split(",")]
    for number in numbers:
        if numbers.count(number) > 1:
            raise argparse.ArgumentTypeError(f"{number} is named twice in {text!r}")
    return numbers


def _integer(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        return value

    return parse


def _seconds(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from {least:g}")
        return value

    return parse


def _output_file(suffix: str) -> Callable[[str], Path]:
    """A file that can be written: checked first, so that no result of a long run is lost."""

    def parse(text: str) -> Path:
        path = Path(text)
        if suffix and path.suffix != suffix:
            raise argparse.ArgumentTypeError(f"{text!r} must end in {suffix}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is a folder; a file is needed")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"the folder {str(path.parent)!r} does not exist")
        target = path if path.exists() else path.parent
        if not os.access(target, os.W_OK):
            raise argparse.ArgumentTypeError(f"{str(target)!r} is not writable")
        return path

    return parse
