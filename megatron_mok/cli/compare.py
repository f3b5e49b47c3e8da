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

    arms = "\n".join(f"  {name:<14}{' '.join(arm.flags)}" for name, arm in ARMS.items())
    return f"""\
arms (the config's `arms` list, or --arms; the first is the reference):
{arms}

written to the output folder:
  results.json     machine, versions, one row per arm, every step's losses and times
  results.csv      the rows alone
  report.png       loss curves, their differences, throughput
  ARM/megatron.log everything Megatron printed in that arm
  ARM/rank*.jsonl  what each rank recorded: step times, losses, hashes of weights and tokens

examples:
  megatron-mok compare configs/tiny_deepseek_v3.yaml
  megatron-mok compare configs/tiny_deepseek_v3.yaml --arms alltoall,mok --steps 20 --out /tmp/try

An arm that cannot run here has the reason in its row. The first arm runs twice: the second time its
expert weights start one last place away, and what that does to the loss is the yardstick for the
differences of the others (--no-yardstick leaves it out).

exit status: 0 every arm that can run here did; 1 an arm failed, or a required arm cannot run;
2 wrong configuration; 130 interrupted
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
        "--require",
        metavar="A,B",
        default="",
        help="of the arms, those whose absence is an error (exit status 1), comma-separated",
    )
    parser.add_argument(
        "--no-yardstick",
        dest="yardstick",
        action="store_false",
        default=None,
        help="do not train the first arm again with its experts moved by 1 ulp",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        default=None,
        help="train every arm twice under Megatron's --deterministic-mode and check that both are "
        "bitwise equal; says nothing about speed",
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, help="train N steps instead of the config's train.steps"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check every arm with Megatron, print the model's parameters, the memory of a rank "
        "and the parallel layout, and train nothing; needs no GPU",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the comparison that `args` ask for; returns the exit status."""
    from rich.console import Console

    from megatron_mok.compare import config as configs
    from megatron_mok.compare.data import DataError
    from megatron_mok.compare.dry_run import dry_run
    from megatron_mok.compare.plot import write_chart
    from megatron_mok.compare.progress import ConsoleDisplay
    from megatron_mok.compare.report import print_report, write_csv, write_json
    from megatron_mok.compare.runner import CompareError, run_comparison
    from megatron_mok.compare.summary import summarize
    from megatron_mok.results import command_line

    try:
        config = configs.load(args.config)
        arms = None if args.arms is None else _names(args.arms)
        config = config.replace(arms, args.steps, args.yardstick, args.deterministic)
        require = _required(args.require, config.arms)
    except configs.ConfigError as error:
        return _fail(2, f"{args.config}: {error}")

    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    out = args.out or Path("compare-out") / f"{config.name}-{now}"
    console = Console()
    try:
        if args.dry_run:
            return dry_run(config)
        with ConsoleDisplay(console) as display:
            results = run_comparison(config, out, display, require)
    except DataError as error:
        return _fail(2, f"{args.config}: {error}")
    except CompareError as error:
        return _fail(1, str(error))
    rows = summarize(config, results)
    write_json(out / "results.json", command_line(), config, results, rows)
    write_csv(out / "results.csv", rows)
    write_chart(out / "report.png", config, results, rows)
    print_report(console, config, results, rows)
    console.print(f"Written to {out}/: results.json, results.csv, report.png, logs", soft_wrap=True)
    return 1 if any(row.failure for row in rows) else 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _required(text: str, arms: tuple[str, ...]) -> tuple[str, ...]:
    from megatron_mok.compare.config import ConfigError

    names = _names(text) if text else ()
    for name in names:
        if name not in arms:
            raise ConfigError(f"--require: {name!r} is not among the arms ({', '.join(arms)})")
    return names


def _fail(status: int, message: str) -> int:
    print(f"megatron-mok compare: {message}", file=sys.stderr)
    return status
