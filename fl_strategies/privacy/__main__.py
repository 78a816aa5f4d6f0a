"""The command ``fl-strategies privacy``, or ``python -m fl_strategies.privacy``.

Answers before any training what a setting will cost, from the same accountant that the
ledger of a run uses, so that the two can never disagree.
"""

import argparse
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
from fl_strategies.privacy.audit import audit_all
from fl_strategies.privacy.bounds.distributions import two_class_laplace_epsilon
from fl_strategies.privacy.bounds.theorems import nfdp_theorem, nfdp_tight
from fl_strategies.privacy.events import NOISES, UNITS, DPSGDEvent, check_votes
from fl_strategies.privacy.ledger import FEW_PARTIES, LARGE_EPSILON
from fl_strategies.privacy.mechanisms import NoisyMax
from fl_strategies.privacy.noise import data_dependent_figure
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
    """What a command found, for machines and for people, and its exit code."""

    report: Mapping[str, Any]
    lines: Sequence[str]
    code: int = 0


class _Labelling(NamedTuple):
    """All releases of one setting: the noise, how often, and the inverse scale or sigma."""

    mechanism: NoisyMax
    releases: int
    parameter: float
    moved: int


def _noise_parameter(options: argparse.Namespace) -> tuple[float, float]:
    """Return gamma or sigma as given, and the scale of the noise."""
    name, other = ("sigma", "gamma") if options.mechanism == "gaussian" else ("gamma", "sigma")
    noise = f"{options.mechanism} noise"
    value, unused = getattr(options, name), getattr(options, other)
    require(unused is None, "epsilon", other, f"omitted for {noise}, use {name}", unused)
    require(value is not None, "epsilon", name, f"given for {noise}", value)
    check_positive("epsilon", name, value)
    return value, value if name == "sigma" else 1 / value


def _labelling(options: argparse.Namespace) -> _Labelling:
    check_count("epsilon", "classes", options.classes, least=2)
    check_count("epsilon", "splits", options.splits, least=1)
    check_count("epsilon", "queries", options.queries, least=1)
    check_delta("epsilon", options.delta)
    if options.voters is not None:
        possible = 1 <= options.voters <= _MOST_VOTERS
        rule = f"between 1 and {_MOST_VOTERS}"
        require(possible, "epsilon", "voters", rule, options.voters)
    parameter, scale = _noise_parameter(options)
    # A party's votes move together; a record is in every partition and moves one vote there.
    whole = options.unit == "party"
    moved, releases = (options.splits, 1) if whole else (1, options.splits)
    mechanism = NoisyMax(
        noise=options.mechanism,
        scale=scale,
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
    """Return the claim, how it is proved, and all bounds for ideal noise."""
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
    """Say what labels voted with noise cost."""
    labelling = _labelling(options)
    votes = None if options.votes is None else _read_votes(options.votes, labelling)
    epsilon, method, found = _claim(options, labelling)
    if votes is not None:
        figure = data_dependent_figure(labelling.mechanism, votes, options.delta)
        found["data-dependent"] = figure
    report = {
        "epsilon": _finite(epsilon),
        "method": method,
        "bounds": {name: _finite(value) for name, value in found.items()},
    }
    warnings = _epsilon_warnings(options, epsilon)
    lines = [
        f"epsilon {_number(epsilon)} at delta {options.delta:g} by {method}",
        *_describe(labelling),
        *(f"  {name:20} {_number(value)}" for name, value in found.items()),
    ]
    return _with_warnings(report, lines, warnings)


def _describe(labelling: _Labelling) -> list[str]:
    event = labelling.mechanism.event
    unit = {"party": "one party", "example": "one record of one party"}[event.unit]
    return [
        f"protects {unit}, replaced by another; votes that move: {labelling.moved} a label",
        f"labels: {labelling.releases} of {event.num_classes} classes",
        f"noise: {event.noise}, scale {event.scale:g}",
    ]


def _epsilon_warnings(options: argparse.Namespace, epsilon: float) -> list[str]:
    parties = options.voters if options.unit == "party" else None
    warnings = _size_warnings(epsilon, options.delta, parties)
    if parties is not None and parties < FEW_PARTIES:
        warnings.append(
            f"With fewer than {FEW_PARTIES} parties, noise that hides one spoils the labels."
        )
    return warnings + ([] if options.votes is None else [_NOT_PUBLISHABLE])


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
    """Say what training on a random sample promises."""
    records, samples = options.records, options.samples
    replacement = options.with_replacement
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
    """Say what DP-SGD costs."""
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
    """Say what every private strategy can do; fail if none can work."""
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
    """Attack every mechanism, and say which kept its promise."""
    results = audit_all(runs=options.runs)
    failed = [name for name, result in results.items() if not result.passed]
    report = {
        "passed": not failed,
        "runs": options.runs,
        "results": {name: result.to_json() for name, result in results.items()},
    }
    lines = [f"{'mechanism':30} {'claimed':>8} {'attacked':>8} {'p-value':>8}  verdict"]
    lines += [
        f"{name:30} {result.claimed_epsilon:8.4f} {result.lower_bound:8.4f} "
        f"{result.p_value:8.2g}  {'passed' if result.passed else 'FAILED'}"
        for name, result in results.items()
    ]
    return Answer(report, lines, int(bool(failed)))


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
        """Raise like every other wrong input instead of printing the usage."""
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
        help="epsilon of labels voted with noise",
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
