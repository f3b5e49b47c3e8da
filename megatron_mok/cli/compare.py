"""`megatron-mok compare`."""

import argparse
import datetime
import sys
from pathlib import Path

_DESCRIPTION = """\
Train one model with several token dispatchers and compare losses, speed and memory.

Every arm runs Megatron's own training loop in fresh processes, from the same step-0 weights and
on the same tokens (both are checked), with the same flags save the dispatcher's.

CONFIG is a YAML file with the sections model, parallel, data, train and the keys arms, device,
precision, seed; see configs/ for examples. A wrong key or value is reported before anything runs.
"""


def _epilog() -> str:
    from megatron_mok.compare.arms import ARMS

    arms = "\n".join(f"  {name:<10}{' '.join(arm.flags)}" for name, arm in ARMS.items())
    return f"""\
arms (the config's `arms` list, or --arms; the first is the reference):
{arms}

written to the output folder:
  results.json     machine, versions, one row per arm, every step's losses and times
  report.png       loss curves, their differences, throughput
  ARM/megatron.log everything Megatron printed in that arm
  ARM/rank*.jsonl  what each rank recorded: step times, losses, hashes of weights and tokens

examples:
  megatron-mok compare configs/tiny_deepseek_v3.yaml
  megatron-mok compare configs/tiny_deepseek_v3.yaml --arms alltoall,mok --steps 20 --out /tmp/try

exit status: 0 all arms ran; 1 an arm failed; 2 wrong configuration; 130 interrupted
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="train one model with several token dispatchers and compare them",
        description=_DESCRIPTION,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file of the comparison")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="output folder (default: compare-out/<name>-<date>-<time>)",
    )
    parser.add_argument(
        "--arms", metavar="A,B", help="run these arms instead of the config's, comma-separated"
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, help="train N steps instead of the config's train.steps"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the comparison that `args` ask for; returns the exit status."""
    from rich.console import Console

    from megatron_mok.compare import config as configs
    from megatron_mok.compare.data import DataError
    from megatron_mok.compare.plot import write_chart
    from megatron_mok.compare.progress import ConsoleDisplay
    from megatron_mok.compare.report import print_report, write_json
    from megatron_mok.compare.runner import CompareError, run_comparison
    from megatron_mok.compare.summary import summarize
    from megatron_mok.results import command_line

    try:
        config = configs.load(args.config)
        arms = None if args.arms is None else tuple(a.strip() for a in args.arms.split(","))
        config = config.replace(arms=arms, steps=args.steps)
    except configs.ConfigError as error:
        return _fail(2, f"{args.config}: {error}")

    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    out = args.out or Path("compare-out") / f"{config.name}-{now}"
    console = Console()
    try:
        with ConsoleDisplay(console) as display:
            results = run_comparison(config, out, display)
    except DataError as error:
        return _fail(2, f"{args.config}: {error}")
    except CompareError as error:
        return _fail(1, str(error))
    rows = summarize(config, results)
    write_json(out / "results.json", command_line(), config, results, rows)
    write_chart(out / "report.png", config, results, rows)
    print_report(console, config, results, rows)
    console.print(f"Written to {out}/: results.json, report.png, logs", soft_wrap=True)
    return 1 if any(row.failure for row in rows) else 0


def _fail(status: int, message: str) -> int:
    print(f"megatron-mok compare: {message}", file=sys.stderr)
    return status
