"""The curves of docs/privacy_curves.md: five data sets, protecting examples and whole parties.

Run: ``python benchmarks/privacy_curves.py [NAME ...]``, for all names below or for some. What
is finished is kept in ``runs``, so a stopped benchmark resumes. Each set of curves ends with
its section of the document, its picture and its results.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from simulations.__main__ import main

DOCS = Path(__file__).parent.parent / "docs"
KEPT = Path("runs")
FAST = "--references=fedhistogram,fedregression"
SUMS = "--strategy=fedhistogram,fedregression"
CELLS = "--strategy=fedhistogram L2"
LINES = "--strategy=fedregression L1"
PARTY_CELLS = "--strategy=fedhistogram L1"
NO_SCORES = "--strategy=fedhistogram,fedregression,fedkt"
VOTES = "--strategy=fedhistogram,fedregression,fedkt,fedmd"
CURVES = {
    "adult_example": ("--data=adult", VOTES, "--set=num-parties=20", "0.1,0.3,1,3"),
    "codrna_example": ("--data=cod-rna", SUMS, "--set=num-parties=20", "0.1,0.3,1,1.7"),
    "mnist_example": ("--data=mnist", CELLS, FAST, "--set=num-parties=10", "0.1,0.5,1,2"),
    "digits_example": ("--data=digits", "--set=num-parties=10", "0.3,1,2,4"),
    "breast-cancer_example": ("--data=breast-cancer", "--set=num-parties=6", "0.3,1,3,8"),
    "adult_party": ("--data=adult", LINES, FAST, "--set=num-parties=50", "0.935,1.381,3,8"),
    "codrna_party": ("--data=cod-rna", SUMS, FAST, "--set=num-parties=50", "1,2.059,3.664,8"),
    "mnist_party": ("--data=mnist", PARTY_CELLS, FAST, "--set=num-parties=50", "1,2,4,8"),
    "digits_party": ("--data=digits", NO_SCORES, "--set=num-parties=20", "1,2,4,8"),
    "breast-cancer_party": ("--data=breast-cancer", "--set=num-parties=10", "1,2,4,8"),
}
"""Settings and epsilons by name. Votes, and noise on every score, cost hours on large sets and
were far below sums on small ones: there they are repeated in part or not at all."""
DRAWS = 4
SLOW = {"mnist_party": 1}
"""Draws where a run takes long."""


def draw(name: str) -> int:
    """Run one set of curves and write all that the document needs of it."""
    *settings, epsilons = CURVES[name]
    unit = name.rpartition("_")[2]
    outputs = {
        "json": KEPT / f"curve_{name}.json",
        "summary": DOCS / "results" / f"curve_{name}.json",
        "png": DOCS / f"curve_{name}.png",
        "markdown": DOCS / "privacy_curves.md",
    }
    paths = [f"--{key}={path}" for key, path in outputs.items()]
    asked = [f"--unit={unit}", f"--epsilons={epsilons}", f"--draws={SLOW.get(name, DRAWS)}"]
    return main(["curve", *settings, *asked, *paths])


def run(names: Sequence[str]) -> int:
    """Run some sets of curves, or all; stop at the first that does not end well."""
    return next((code for code in map(draw, names or CURVES) if code), 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CURVES))
    chosen = parser.parse_args().names
    if unknown := {*chosen} - {*CURVES}:
        parser.error(f"NAME must be one of {', '.join(CURVES)}, got {', '.join(unknown)}.")
    sys.exit(run(chosen))
