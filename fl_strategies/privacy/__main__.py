"""The command line: ``python -m fl_strategies.privacy --help``.

Answers before any training what a setting will cost, from the same accountant that the
ledger of a run uses, so that the two can never disagree.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fl_strategies.exceptions import (
    InvalidParameter,
    StrategyError,
)
from fl_strategies.privacy._commands import (
    Answer,
    answer_audit,
    answer_dpsgd,
    answer_epsilon,
    answer_nfdp,
    answer_plan,
)
from fl_strategies.privacy.events import NOISES, UNITS
from fl_strategies.privacy.planning import DEFAULT_MARGINS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise like every other wrong input instead of printing the usage."""
        raise InvalidParameter(f"{self.prog}: {message}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        options = _parser().parse_args(arguments)
        answer: Answer = options.command(options)
    except StrategyError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    report = json.dumps(answer.report, allow_nan=False)
    sys.stdout.write((report if options.json else "\n".join(answer.lines)) + "\n")
    return answer.code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fl_strategies.privacy",
        description="What releases of private knowledge cost, and whether the noise is right.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_epsilon(commands)
    _add_nfdp(commands)
    _add_dpsgd(commands)
    _add_plan(commands)
    _add_audit(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _add_epsilon(commands: Any) -> None:
    parser = commands.add_parser(
        "epsilon",
        help="epsilon of labels voted with noise (FedKT at levels L1 and L2)",
        description="Epsilon of noisy-max labels when one party (level L1) or one record of "
        "one party (level L2) is replaced by another. The smallest bound is the claim.",
    )
    parser.add_argument("--mechanism", choices=NOISES, required=True, help="kind of noise")
    _add_count(parser, "--classes", "C", "classes voted on")
    parser.add_argument(
        "--gamma", type=float, metavar="G", help="1 / scale of Laplace or Gumbel noise"
    )
    parser.add_argument(
        "--sigma", type=float, metavar="S", help="standard deviation of Gaussian noise"
    )
    _add_count(parser, "--splits", "s", "partitions of a party")
    _add_count(parser, "--queries", "Q", "public rows that are labelled")
    _add_delta(parser)
    parser.add_argument(
        "--unit",
        choices=UNITS,
        required=True,
        help="party: each moves s votes of a query; example: each moves 1 vote of a query "
        "in every one of the s partitions, so s times the queries are released",
    )
    parser.add_argument(
        "--votes",
        type=Path,
        metavar="FILE.npy",
        help="counts before noise, (releases, classes), for the data-dependent figure, "
        "which is private itself and never the claim",
    )
    parser.add_argument(
        "--voters",
        type=int,
        metavar="N",
        help="how many parties (or teachers) vote; gives the privacy loss distribution of "
        "two classes with Laplace noise",
    )
    parser.add_argument(
        "--adaptive", action="store_true", help="queries may depend on earlier answers"
    )
    parser.set_defaults(command=answer_epsilon)


def _add_nfdp(commands: Any) -> None:
    parser = commands.add_parser(
        "nfdp", help="epsilon and delta of training on a random sample, without noise"
    )
    _add_count(parser, "--records", "n", "records of a party")
    _add_count(parser, "--samples", "k", "records drawn")
    parser.add_argument(
        "--with-replacement", action="store_true", help="a record may be drawn twice"
    )
    parser.set_defaults(command=answer_nfdp)


def _add_dpsgd(commands: Any) -> None:
    parser = commands.add_parser(
        "dpsgd", help="epsilon of DP-SGD with Poisson batches, one record blanked"
    )
    _add_count(parser, "--records", "n", "records of a party")
    _add_count(parser, "--batch", "B", "expected size of a batch")
    _add_count(parser, "--steps", "T", "gradient steps in all")
    parser.add_argument(
        "--noise-multiplier",
        type=float,
        required=True,
        metavar="S",
        help="deviation of the noise / clipping norm",
    )
    _add_delta(parser)
    parser.set_defaults(command=answer_dpsgd)


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="what every private strategy can do for an epsilon, and which to take",
        description="For every private strategy: noise, queries or cells, the expected share "
        "of labels that are as they would be without noise, and what one run and ten cost.",
    )
    parser.add_argument("--target-epsilon", type=float, required=True, metavar="E")
    _add_count(parser, "--parties", "P", "parties of the federation")
    _add_count(parser, "--records", "n", "records of one party")
    _add_count(parser, "--classes", "C", "classes")
    _add_count(parser, "--public", "N", "public rows")
    parser.add_argument(
        "--columns", type=int, metavar="D", help="values of a row, as far as they limit a plan"
    )
    parser.add_argument(
        "--unit", choices=UNITS, default="example", help="who is protected (default: example)"
    )
    _add_delta(parser)
    parser.add_argument(
        "--margins",
        type=_numbers,
        default=DEFAULT_MARGINS,
        metavar="M,M,...",
        help="equally likely leads of the first class over the second, as shares of the votes "
        f"on a row (default: {','.join(map(str, DEFAULT_MARGINS))})",
    )
    parser.set_defaults(command=answer_plan)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        rule = f"must be numbers with commas, got {text!r}"
        raise argparse.ArgumentTypeError(rule) from None


def _add_audit(commands: Any) -> None:
    parser = commands.add_parser(
        "audit", help="attack every mechanism many times and compare with its claim"
    )
    parser.add_argument(
        "--runs",
        type=int,
        metavar="N",
        default=300_000,
        help="releases of each input (default: 300000)",
    )
    parser.set_defaults(command=answer_audit)


def _add_count(parser: argparse.ArgumentParser, flag: str, symbol: str, meaning: str) -> None:
    parser.add_argument(flag, type=int, required=True, metavar=symbol, help=meaning)


def _add_delta(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--delta",
        type=float,
        default=1e-5,
        metavar="D",
        help="between 0 and 1 (default: 1e-05)",
    )


if __name__ == "__main__":
    sys.exit(main())
