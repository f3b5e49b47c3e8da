"""Entry point of `megatron-mok`: finds the subcommand and turns errors into exit statuses."""

import argparse
import signal
import sys

from . import bench, compare, doctor, flags

_SUBCOMMANDS = (compare, bench, doctor, flags)
"""Modules with `add_parser(subparsers)`, which sets `run`: a function from the parsed arguments to
an exit status."""

_DESCRIPTION = """\
megatron_mok: Mixture-of-Experts token dispatcher for Megatron-Core.

In training, use Megatron's own flag: --moe-token-dispatcher-type mok
"""

_EPILOG = """\
exit status:
  0  all went well
  1  it ran, but something failed or does not hold
  2  wrong arguments or configuration
  130  interrupted (128 + the signal's number)
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="megatron-mok",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _SUBCOMMANDS:
        module.add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's). Returns the exit status."""
    args = build_parser().parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit_on_signal)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _exit_on_signal(number, frame):
    # As an exception, so that commands end their child processes on the way out.
    sys.exit(128 + number)
