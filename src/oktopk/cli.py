"""The command line: `oktopk methods`, `oktopk check`."""

from __future__ import annotations

import argparse
import sys

from oktopk.comm import ExchangeError
from oktopk.methods import METHODS
from oktopk.version import __version__


def methods(_: argparse.Namespace) -> int:
    """Print the table of methods."""
    rows = [("method", "words sent per rank and step", "what it does")]
    rows += [(name, method.words, method.summary) for name, method in METHODS.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, words, summary in rows:
        sys.stdout.write(f"{name:{widths[0]}}  {words:{widths[1]}}  {summary}\n")
    sys.stdout.write("n elements, k kept, P ranks; headers apart (docs/algorithms.md)\n")
    return 0


def check(args: argparse.Namespace) -> int:
    """Run the self-test."""
    from oktopk.check import check

    return check(args.workers, args.timeout, args.quick, sys.argv[1:])


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; each has its own help with an example."""
    main = argparse.ArgumentParser(prog="oktopk", description=__doc__)
    main.add_argument("--version", action="version", version=__version__)
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    table = commands.add_parser(
        "methods", help="the methods and what they send", epilog="example: oktopk methods"
    )
    table.set_defaults(run=methods)
    test = commands.add_parser(
        "check",
        help="a self-test of these machines: network, and the laws on small gradients",
        epilog="examples: oktopk check --workers 4; torchrun --nproc-per-node 2 -m oktopk check",
    )
    test.add_argument("--workers", type=int, help="processes to start, without launcher (2)")
    test.add_argument("--quick", action="store_true", help="four steps of each method, not 36")
    test.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a rank")
    test.set_defaults(run=check)
    return main


def main() -> None:
    from oktopk.launch import LaunchError

    args = parser().parse_args()
    try:
        sys.exit(args.run(args))
    except (LaunchError, ExchangeError) as error:  # it says all; where it was raised does not help
        sys.exit(f"oktopk: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
