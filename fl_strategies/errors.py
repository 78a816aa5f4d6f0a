"""Every error this package raises on purpose.

StrategyError
├── InvalidParameter      (ValueError)      a setting breaks its rule
├── UnsupportedLearner    (TypeError)       a learner lacks a method the strategy needs
├── KnowledgeMismatch     (ValueError)      a message is not what was requested
│   └── PublicDataMismatch                  server and party hold different public data
├── InvalidData           (ValueError)      private, public or test data break the contract
│   └── CorruptJournal                      a party's journal is not as it was written
├── MissingExtra          (ImportError)     an optional package is not installed
├── ForeignPackage        (ImportError)     another package has the name of one of ours
├── NotFitted             (AttributeError)  a result is read before there is one
├── NotEnoughParties      (RuntimeError)    too few parties came or answered
├── RunFailed             (RuntimeError)    a run has ended without a result
├── RequestRefused        (RuntimeError)    a party's policy does not allow what is asked
├── PrivacyBudgetExceeded (RuntimeError)    a release would cost more than is left
├── JournalUnavailable    (OSError)         the disk does not take a party's journal
└── CheckpointUnavailable (OSError)         the disk does not take a checkpoint

Each is also a fitting built-in error, so callers need not know this tree.
"""

import math
import numbers


class StrategyError(Exception):
    """Root of the tree; catch this to catch everything the package raises."""


class InvalidParameter(StrategyError, ValueError):
    """A setting breaks its rule."""


class UnsupportedLearner(StrategyError, TypeError):
    """A learner lacks a method that the strategy needs."""


class KnowledgeMismatch(StrategyError, ValueError):
    """A message is not what was requested."""


class PublicDataMismatch(KnowledgeMismatch):
    """Server and party hold different public data."""


class InvalidData(StrategyError, ValueError):
    """Private, public or test data break the contract."""


class CorruptJournal(InvalidData):
    """A journal is not as it was written, so the budget that is left is unknown."""


class MissingExtra(StrategyError, ImportError):
    """An optional package is not installed."""

    def __init__(self, owner: str, package: str, extra: str) -> None:
        super().__init__(
            f"{owner}: the package {package!r} must be installed, got none. "
            f'Run: pip install "fl-strategies[{extra}]"'
        )


class ForeignPackage(StrategyError, ImportError):
    """Python finds another package first that has the name of one of ours."""

    def __init__(self, name: str, found: object) -> None:
        super().__init__(
            f"fl-strategies: the package {name!r} must be its own, got {found}, which Python "
            f"finds first. Rename that one, or start from a folder without it, or with "
            f"`python -P`."
        )


class NotFitted(StrategyError, AttributeError):
    """A result is read before there is one."""


class NotEnoughParties(StrategyError, RuntimeError):
    """Too few parties came or answered."""


class RunFailed(StrategyError, RuntimeError):
    """A run has ended without a result; the strategy's ledger has what was released."""


class RequestRefused(StrategyError, RuntimeError):
    """A party's policy does not allow a server's request; no record was accessed."""


class PrivacyBudgetExceeded(StrategyError, RuntimeError):
    """A release would cost more than is left; nothing was released."""


class JournalUnavailable(StrategyError, OSError):
    """The disk did not take the line, so nothing may leave the party."""


class CheckpointUnavailable(StrategyError, OSError):
    """The disk does not take the checkpoint, or another server uses it."""


def between(least: object, most: object, noun: str = "") -> str:
    """Return the rule for a number of a range, which may leave a single one.

    Examples
    --------
    >>> between(1, 9, "a whole number"), between(3, 3, "a whole number")
    ('a whole number from 1 to 9', '3')
    """
    return f"{least}" if least == most else f"{noun} from {least} to {most}".lstrip()


def require(holds: bool, owner: str, parameter: str, rule: str, value: object) -> None:
    """Raise `InvalidParameter` in the package's one sentence unless the rule holds.

    Examples
    --------
    >>> require(0 > 1, "FedKT", "gamma", "greater than 0", -1)
    Traceback (most recent call last):
    fl_strategies.errors.InvalidParameter: FedKT: gamma must be greater than 0, got -1.
    """
    if not holds:
        raise InvalidParameter(f"{owner}: {parameter} must be {rule}, got {value!r}.")


def require_data(holds: bool, owner: str, parameter: str, rule: str, value: object) -> None:
    """Raise `InvalidData` in the package's one sentence unless the rule holds."""
    if not holds:
        raise InvalidData(f"{owner}: {parameter} must be {rule}, got {value}.")


def require_known(holds: bool, owner: str, name: str, rule: str, value: object) -> None:
    """Raise `KnowledgeMismatch` in the package's one sentence unless the rule holds."""
    if not holds:
        # Truncated: an untrusted party must not be able to fill the logs.
        raise KnowledgeMismatch(f"{owner}: {name} must be {rule}, got {str(value)[:200]}.")


def check_delta(owner: str, delta: float) -> None:
    """Raise `InvalidParameter` unless delta is a probability strictly inside (0, 1)."""
    require(0 < delta < 1, owner, "delta", "greater than 0 and less than 1", delta)


def check_positive(owner: str, name: str, value: float) -> None:
    """Raise `InvalidParameter` unless a setting is a finite number above 0."""
    require(0 < value < math.inf, owner, name, "greater than 0 and finite", value)


def check_count(owner: str, name: str, value: int, *, least: int = 0) -> None:
    """Raise `InvalidParameter` unless a number of things is a whole number."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require(whole and value >= least, owner, name, f"a whole number, at least {least}", value)
