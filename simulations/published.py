"""What a paper prints about a row of a table, as numbers where it prints numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from fl_strategies.errors import require

WORDS: Final[Mapping[str, str]] = {
    "federation": "",
    "alone": "solo-",
    "pooled": "central-",
    "PATE": "pate-",
    "public-only": "public-only-",
}
"""What a file calls a figure, and the prefix that reports give it."""


@dataclass(frozen=True)
class Published:
    """Figures of a paper, in percent where they are shares.

    Parameters
    ----------
    figures : mapping of prefix to float
        See `WORDS`; the federation's own has an empty prefix.
    deviation : float, optional
        Of the federation's figure, as printed.
    epsilon : float, optional
        What the paper says its noise costs.
    note : str
        Words: what is not a number, or how the paper's row differs.

    Examples
    --------
    >>> row = Published.read({"federation": 82.2, "deviation": 0.6, "alone": 68.6})
    >>> str(row), row.figures["solo-"], str(Published.read(90.5)), str(Published.read("-"))
    ('82.2 ± 0.6, alone 68.6', 68.6, '90.5', '-')
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    deviation: float | None = None
    epsilon: float | None = None
    note: str = ""

    @classmethod
    def read(cls, told: Any) -> Self:
        """Read a number, a text, or a table of `WORDS`, deviation, epsilon and note."""
        if isinstance(told, str):
            return cls(note=told)
        if not isinstance(told, Mapping):
            return cls({"": float(told)})
        known = {*WORDS, "deviation", "epsilon", "note"}
        for key in told:
            require(key in known, "table", "published", f"of {', '.join(sorted(known))}", key)
        figures = {WORDS[word]: float(told[word]) for word in WORDS if word in told}
        return cls(figures, told.get("deviation"), told.get("epsilon"), told.get("note", ""))

    def __str__(self) -> str:
        """Return all of it in one cell."""
        parts = [self._told(word) for word in WORDS if WORDS[word] in self.figures]
        if self.epsilon is not None:
            parts.append(f"ε {self.epsilon}")
        if self.note:
            whole = ", ".join(parts)
            return f"{whole} ({self.note})" if parts else self.note
        return ", ".join(parts)

    def _told(self, word: str) -> str:
        figure = f"{self.figures[WORDS[word]]}"
        if word != "federation":
            return f"{word} {figure}"
        return figure if self.deviation is None else f"{figure} ± {self.deviation}"
