"""The command ``fl-strategies privacy``, or ``python -m fl_strategies.privacy``.

Computes the cost of a setting before any training, with the accountant of the ledger.
"""

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fl_strategies._util import Array
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    StrategyError,
    check_count,
    check_delta,
    check_positive,
    require,
    require_data,
)
from fl_strategies.privacy import accountant
from fl_strategies.privacy.bounds.distributions import two_class_laplace_epsilon
from fl_strategies.privacy.bounds.theorems import nfdp_theorem, nfdp_tight
from fl_strategies.privacy.events import NOISES, UNITS, DPSGDEvent, check_votes
from fl_strategies.privacy.ledger import FEW_PARTIES, LARGE_EPSILON
from fl_strategies.privacy.mechanisms import NoisyMax
from fl_strategies.privacy.noise import epsilon_of_votes
from fl_strategies.privacy.planning import DEFAULT_MARGINS, plan

PROGRAM = "python -m fl_strategies.privacy"
BOUNDS = ("moments", "optimal-composition", "bounded-range", "zcdp", "pld", "data-dependent")
_MOST_VOTERS = 10_000
_LARGEST_LEAD = 50.0
_NOT_PUBLISHABLE = (
    "The data-dependent figure is computed from private votes and holds in one direction "
    "only: do not publish it."
)


class Answer(NamedTuple):
    """The answer to a command, for machines and for people, and its exit code."""

    report: Mapping[str, Any]
    lines: Sequence[str]
    code: int = 0


class _Labelling(NamedTuple):
    """All releases of one setting: the noise, their number, and the inverse scale or sigma."""

    mechanism: NoisyMax
    releases: int
    parameter: float
    moved: int


def _labelling(options: argparse.Namespace) -> _Labelling:
    check_count("epsilon", "classes", options.classes, least=2)
    check_count("epsilon", "splits", options.splits, least=1)
    check_count("epsilon", "queries", options.queries, least=1)
    check_delta("epsilon", options.delta)
    if options.voters is not None:
        possible, rule = 1 <= options.voters <= _MOST_VOTERS, f"between 1 and {_MOST_VOTERS}"
        require(possible, "epsilon", "voters", rule, options.voters)
    name, other = ("sigma", "gamma") if options.mechanism == "gaussian" else ("gamma", "sigma")
    noise, unused = f"{options.mechanism} noise", getattr(options, other)
    require(unused is None, "epsilon", other, f"omitted for {noise}, use {name}", unused)
    parameter = getattr(options, name)
    require(parameter is not None, "epsilon", name, f"given for {noise}", parameter)
    check_positive("epsilon", name, parameter)
    # A party's votes move together; a record is in every partition and moves one vote there.
    moved, releases = (options.splits, 1) if options.unit == "party" else (1, options.splits)
    mechanism = NoisyMax(
        noise=options.mechanism,
        scale=parameter if name == "sigma" else 1 / parameter,
        sensitivity=moved,
        unit=options.unit,
        num_classes=options.classes,
    )
    return _Labelling(mechanism, releases * options.queries, parameter, moved)


def _read_votes(path: Path, labelling: _Labelling) -> Array:
    try:
        # Mapped, so that a header that promises terabytes is refused before they are read.
        votes = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise InvalidData(
            f"epsilon: votes must be a .npy file of numbers, got {str(path)!r} ({error})."
        ) from error
    expected = (labelling.releases, labelling.mechanism.num_classes)
    rule = f"one row a release and one column a class, {expected}"
    require_data(votes.shape == expected, "epsilon", "votes", rule, votes.shape)
    check_votes("epsilon", votes)
    return np.array(votes)


def _two_class_pld(
    options: argparse.Namespace, labelling: _Labelling
) -> Callable[[float], float] | None:
    mechanism = labelling.mechanism
    applies = mechanism.noise == "laplace" and mechanism.num_classes == 2
    if options.voters is None or not applies:
        return None
    gamma, splits = labelling.parameter, labelling.moved
    # Larger leads are overturned with a chance below 1e-20 and would only take memory.
    voters = min(options.voters, math.ceil(_LARGEST_LEAD / (gamma * splits)))
    return lambda delta: two_class_laplace_epsilon(
        gamma, voters, labelling.releases, delta, splits=splits
    )


def _claim(
    options: argparse.Namespace, labelling: _Labelling
) -> tuple[float, str, dict[str, float | None]]:
    """Return the claim, the method that proves it, and all bounds for ideal noise."""
    entries, adaptive = [(labelling.mechanism.event, labelling.releases)], options.adaptive
    known = accountant.bounds(entries, options.delta, adaptive=adaptive)
    best = accountant.claim(entries, options.delta, adaptive=adaptive)
    found = {name: known.get(name) for name in BOUNDS}
    # Gaussian noise has one privacy loss distribution, known in closed form.
    exact = known["gaussian"]
    two_class = _two_class_pld(options, labelling)
    found["pld"] = exact if two_class is None else two_class(options.delta)
    name = "pld" if best.method == "gaussian" else best.method
    if name not in found and best.epsilon < math.inf:
        found[name] = best.epsilon
    if two_class is None:
        return best.epsilon, name, found
    exact = accountant.paid_epsilon(two_class, options.delta, accountant.error_of(entries))
    return (*min((best.epsilon, name), (exact, "pld")), found)


def answer_epsilon(options: argparse.Namespace) -> Answer:
    """Return the cost of labels voted with noise."""
    labelling = _labelling(options)
    votes = None if options.votes is None else _read_votes(options.votes, labelling)
    epsilon, method, found = _claim(options, labelling)
    if votes is not None:
        found["data-dependent"] = epsilon_of_votes(labelling.mechanism, votes, options.delta)
    report = {
        "epsilon": _finite(epsilon),
        "method": method,
        "bounds": {name: _finite(value) for name, value in found.items()},
    }
    event = labelling.mechanism.event
    whom = {"party": "one party", "example": "one record of one party"}[event.unit]
    lines = [
        f"epsilon {_number(epsilon)} at delta {options.delta:g} by {method}",
        f"protects {whom}, replaced by another; votes that move: {labelling.moved} a label",
        f"labels: {labelling.releases} of {event.num_classes} classes",
        f"noise: {event.noise}, scale {event.scale:g}",
        *(f"  {name:20} {_number(value)}" for name, value in found.items()),
    ]
    parties = options.voters if options.unit == "party" else None
    warnings = _size_warnings(epsilon, options.delta, parties)
    if parties is not None and parties < FEW_PARTIES:
        warnings.append(
            f"With fewer than {FEW_PARTIES} parties, noise that hides one spoils the labels."
        )
    if votes is not None:
        warnings.append(_NOT_PUBLISHABLE)
    return _with_warnings(report, lines, warnings)


def _size_warnings(epsilon: float, delta: float, units: int | None) -> list[str]:
    warnings = []
    if math.isinf(epsilon):
        warnings.append("No finite epsilon holds at this delta.")
    elif epsilon > LARGE_EPSILON:
        warnings.append(f"An epsilon above {LARGE_EPSILON} promises next to nothing.")
    if units is not None and delta * units >= 1:
        warnings.append(f"delta must be well below 1 / {units}, one over the units protected.")
    return warnings


def answer_nfdp(options: argparse.Namespace) -> Answer:
    """Return the guarantee of training on a random sample."""
    records, samples, replacement = options.records, options.samples, options.with_replacement
    theorem = nfdp_theorem(records, samples, replacement=replacement)
    tight = nfdp_tight(records, samples, replacement=replacement)
    report: dict[str, Any] = {**theorem._asdict(), "tight": tight._asdict()}
    lines = [
        f"theorem: epsilon {_number(theorem.epsilon)} at delta {tight.delta:.6g}",
        f"tight: epsilon 0 at delta {tight.delta:.6g}, the chance that a record is drawn",
    ]
    if tight.delta * records > 1 + 1e-9:
        report["warning"] = (
            f"delta exceeds 1 / {records}: publishing the {samples} drawn records in the "
            "clear would satisfy the same guarantee."
        )
        lines.append(f"warning: {report['warning']}")
    return Answer(report, lines)


def answer_dpsgd(options: argparse.Namespace) -> Answer:
    """Return the cost of DP-SGD."""
    event = DPSGDEvent(
        noise_multiplier=options.noise_multiplier,
        records=options.records,
        batch_size=options.batch,
        steps=options.steps,
    )
    best = accountant.claim([(event, 1)], options.delta)
    report = {
        "epsilon": _finite(best.epsilon),
        "delta": options.delta,
        "method": best.method,
        "unit": event.unit,
        "relation": event.relation,
    }
    lines = [
        f"epsilon {_number(best.epsilon)} at delta {options.delta:g} by {best.method}",
        "protects one record, blanked; every later prediction is free",
    ]
    warnings = _size_warnings(best.epsilon, options.delta, options.records)
    return _with_warnings(report, lines, warnings)


def answer_plan(options: argparse.Namespace) -> Answer:
    """Plan every private strategy; fail if none can work."""
    plans = plan(
        target_epsilon=options.target_epsilon,
        num_parties=options.parties,
        num_records=options.records,
        num_classes=options.classes,
        num_public=options.public,
        num_columns=options.columns,
        unit=options.unit,
        delta=options.delta,
        margins=options.margins,
    )
    units = options.parties if options.unit == "party" else options.records
    warnings = _size_warnings(options.target_epsilon, options.delta, units)
    answer = _with_warnings(plans.to_json(), [*plans.lines()], warnings)
    return answer._replace(code=int(plans.best is None))


def answer_audit(options: argparse.Namespace) -> Answer:
    """Attack every mechanism, as the tests of a checkout do; fail if one breaks its promise."""
    rule = "that of a checkout of the repository, whose tests hold the attacks"
    is_checkout = (Path(__file__).parents[2] / "tests" / "audit").is_dir()
    require(is_checkout, "audit", "the package", rule, "an installed one")
    return Answer(*importlib.import_module("tests.audit.mechanisms").report(options.runs))


def _with_warnings(
    report: Mapping[str, Any], lines: Sequence[str], warnings: Sequence[str]
) -> Answer:
    extra = {"warnings": list(warnings)} if warnings else {}
    return Answer({**report, **extra}, [*lines, *(f"warning: {text}" for text in warnings)])


def _finite(value: float | None) -> float | None:
    # JSON has no infinity: where nothing is promised there is no number.
    return value if value is not None and math.isfinite(value) else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise `InvalidParameter` instead of printing the usage."""
        raise InvalidParameter(f"{self.prog}: {message}.")


def main(arguments: Sequence[str] | None = None, prog: str = PROGRAM) -> int:
    """Run one command and return its exit code."""
    try:
        options = _parser(prog).parse_args(arguments)
        answer: Answer = options.command(options)
    except StrategyError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    report = json.dumps(answer.report, allow_nan=False)
    sys.stdout.write((report if options.json else "\n".join(answer.lines)) + "\n")
    return answer.code


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description="What releases of private knowledge cost, and whether the noise is right.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_epsilon, _add_nfdp, _add_dpsgd, _add_plan, _add_audit):
        add(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _add_epsilon(commands: Any) -> None:
    parser = commands.add_parser(
        "epsilon",
        help="epsilon of labels voted with noise",
        description="Epsilon of noisy-max labels when one party (level L1) or one record of "
        "one party (level L2) is replaced by another. The smallest bound is the claim.",
    )
    add = parser.add_argument
    add("--mechanism", choices=NOISES, required=True, help="kind of noise")
    add("--gamma", type=float, metavar="G", help="1 / scale of Laplace or Gumbel noise")
    add("--sigma", type=float, metavar="S", help="standard deviation of Gaussian noise")
    _add_counts(
        parser,
        classes=("C", "classes voted on"),
        splits=("s", "partitions of a party"),
        queries=("Q", "public rows that are labelled"),
    )
    _add_delta(parser)
    add(
        "--unit",
        choices=UNITS,
        required=True,
        help="party: each moves s votes of a query; example: each moves 1 vote of a query "
        "in every one of the s partitions, so s times the queries are released",
    )
    add(
        "--votes",
        type=Path,
        metavar="FILE.npy",
        help="counts before noise, (releases, classes), for the data-dependent figure, "
        "which is private itself and never the claim",
    )
    add(
        "--voters",
        type=int,
        metavar="N",
        help="how many parties (or teachers) vote; gives the privacy loss distribution of "
        "two classes with Laplace noise",
    )
    add("--adaptive", action="store_true", help="queries may depend on earlier answers")
    parser.set_defaults(command=answer_epsilon)


def _add_nfdp(commands: Any) -> None:
    parser = commands.add_parser(
        "nfdp", help="epsilon and delta of training on a random sample, without noise"
    )
    _add_counts(parser, records=("n", "records of a party"), samples=("k", "records drawn"))
    parser.add_argument(
        "--with-replacement", action="store_true", help="a record may be drawn twice"
    )
    parser.set_defaults(command=answer_nfdp)


def _add_dpsgd(commands: Any) -> None:
    parser = commands.add_parser(
        "dpsgd", help="epsilon of DP-SGD with Poisson batches, one record blanked"
    )
    _add_counts(
        parser,
        records=("n", "records of a party"),
        batch=("B", "expected size of a batch"),
        steps=("T", "gradient steps in all"),
    )
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
    add = parser.add_argument
    add("--target-epsilon", type=float, required=True, metavar="E")
    _add_counts(
        parser,
        parties=("P", "parties of the federation"),
        records=("n", "records of one party"),
        classes=("C", "classes"),
        public=("N", "public rows"),
    )
    add("--columns", type=int, metavar="D", help="values of a row, as far as they limit a plan")
    who = "who is protected (default: example)"
    add("--unit", choices=UNITS, default="example", help=who)
    _add_delta(parser)
    add(
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
        "audit",
        help="attack every mechanism many times and compare with its claim (from a checkout)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        metavar="N",
        default=300_000,
        help="releases of each input (default: 300000)",
    )
    parser.set_defaults(command=answer_audit)


def _add_counts(parser: argparse.ArgumentParser, **counts: tuple[str, str]) -> None:
    """Add required whole numbers, each with its symbol and meaning."""
    for name, (symbol, meaning) in counts.items():
        parser.add_argument(f"--{name}", type=int, required=True, metavar=symbol, help=meaning)


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
