"""What one and three liars of ten do to strategies on sums, at every level.

Run: ``python benchmarks/lying_sums.py``; results that are there are not measured again, and
``--show`` prints the tables of them alone. Ten parties, or fifty of which five and fifteen lie,
iid or Dirichlet 0.5. Liars know the rules, and what all honest parties have sent:

    target     their records are all of class t
    permuted   each of their records is of the next class
    anti       a histogram of the class that is second in a record's cells; as long a vector
               against the sum of all others as so many records can have; moments of records
               that are as far from the others of their class as rows can be
    crowded    all records where fewest exchange the first two classes of a cell, with noise
               as much beside as it is unlikely to reach; for a regression all in the
               component that public rows vary in least, and for moments as anti with as few
               products as they can have
    loud       as target, and as much more as noise of the party's own is unlikely to reach;
               for moments as anti, a thousand times

Each with the records that they have (own), twice as many (doubled), as many as the largest
honest party (largest) and a thousand times as many (absurd), as claimed and as summed up.
Tables show the claim that does most.

The figures are of the final model on the test rows: points of accuracy that are lost, and
targeted success, the share of rows of other classes that are taken for t, both against the
same federation without liars. Noise is seeded, and the same with liars and without.
"""

import argparse
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.app import client_app
from fl_strategies import FedHistogram, FedMoments, Knowledge
from fl_strategies._util import FloatArray, IntArray, derive_rng
from fl_strategies.aggregation.moments import coded, pack
from fl_strategies.strategies.sums.summary import direction
from fl_strategies.wire import keys
from simulations.config import Settings, Value
from simulations.federation import load_federation
from simulations.runtime.local import run_local

RESULTS: Final = Path(__file__).parents[1] / "docs" / "results" / "lying_sums.json"
SEEDS: Final = (400, 401, 402, 403, 404)
NUM_PARTIES: Final = 10
NOBODY: Final = "nobody"
COUNTS: Final = (1, 3)
LARGEST_SUM: Final = 2**31 - 1
ABSURD: Final = 1000.0
ENOUGH: Final = 1.3
"""How many times the lead of a class a liar spends on a cell."""
DEALS: Mapping[str, Mapping[str, Value]] = {
    "iid": {"partition": "iid"},
    "Dirichlet 0.5": {"partition": "dirichlet", "beta": 0.5},
}
STRATEGIES: Mapping[str, Mapping[str, Value]] = {
    "digits, FedHistogram": {"data": "digits", "strategy": "fedhistogram"},
    "Adult, FedHistogram": {"data": "adult", "strategy": "fedhistogram"},
    "Adult, FedRegression": {"data": "adult", "strategy": "fedregression"},
    "cod-rna, FedRegression": {"data": "cod-rna", "strategy": "fedregression"},
    "digits, FedMoments": {"data": "digits", "strategy": "fedmoments"},
    "Adult, FedMoments": {"data": "adult", "strategy": "fedmoments"},
    "cod-rna, FedMoments": {"data": "cod-rna", "strategy": "fedmoments"},
}
LEVELS: Mapping[str, Mapping[str, Value]] = {
    "no noise": {},
    "central": {"privacy-level": "central", "target-epsilon": 1.0},
    "L2": {"privacy-level": "L2", "target-epsilon": 1.0},
    "L1": {"privacy-level": "L1", "target-epsilon": 30.0},
    "L1, 50 parties": {"privacy-level": "L1", "target-epsilon": 8.0, "num-parties": 50},
}
EPSILON_OF_DIGITS: Final = 4.0
"""At L2: with 1,000 records, ten times the noise of one party leaves little at 1."""
LARGE_MOMENTS: Final = ("Adult, FedMoments", "cod-rna, FedMoments")
UNKNOWN: Final = "central, records not announced"
ROWS: Mapping[str, tuple[str, str]] = {
    f"{name}, {level}": (name, level) for name in STRATEGIES for level in (*LEVELS, UNKNOWN)
}
ATTACKS: Mapping[str, Sequence[str]] = {
    "target": ("own", "doubled", "largest", "absurd"),
    "permuted": ("own", "doubled", "largest", "absurd"),
    "anti": ("own", "doubled", "largest", "absurd"),
    "crowded": ("own", "largest"),
    "loud": ("own",),
}

Outcomes: TypeAlias = dict[str, dict[str, float]]


def settings_of(row: str, deal: str, seed: int) -> Settings:
    """Return the settings of a row."""
    name, level = ROWS[row]
    noise = dict(LEVELS["central" if level == UNKNOWN else level])
    if noise:
        noise["seeded-noise"] = True
    if level == "L2" and "digits" in name:
        noise["target-epsilon"] = EPSILON_OF_DIGITS
    own = {"num-parties": NUM_PARTIES, **STRATEGIES[name], **noise, **DEALS[deal], "seed": seed}
    return Settings.from_run_config(own)


def attacks_on(row: str) -> Iterator[tuple[str, str]]:
    """Return attacks and claims; directions have no size, and noise is not everywhere."""
    name, level = ROWS[row]
    for attack, claims in ATTACKS.items():
        for claim in claims:
            sized = claim == "own" or not level.startswith("L1")
            noisy = attack != "loud" or (level == "L2" and "FedRegression" not in name)
            made = attack != "crowded" or "FedMoments" not in name
            quick = name not in ("Adult, FedHistogram", *LARGE_MOMENTS) or (
                attack != "crowded" and claim in ("own", "absurd")
            )
            if sized and noisy and made and quick:
                yield attack, claim


class Laboratory:
    """Runs federations whose honest parties answer the same whoever lies."""

    def __init__(self, row: str, deal: str, seed: int) -> None:
        self.settings = settings_of(row, deal, seed)
        self.federation = load_federation(self.settings)
        self.announced = ROWS[row][1] != UNKNOWN
        self.strategy = self._strategy()
        self.target = seed % self.federation.dataset.num_classes
        self.num_parties = self.settings.num_parties
        self.parties = [self.federation.party(number) for number in range(self.num_parties)]
        self.sizes = np.array([len(party.y) for party in self.parties])
        self.exact = [self._summed(party.x, party.y) for party in self.parties]
        order = derive_rng(seed, "hostile").permutation(self.num_parties)
        self.order = [int(number) for number in order]
        self._answers: dict[int, RecordDict] = {}

    def _strategy(self) -> Any:
        strategy: Any = self.federation.strategy()
        strategy.evaluate = False
        if not self.announced:
            # As much detail as otherwise; only the claims have nothing to be held against.
            strategy.options = replace(strategy.options, num_records=None)
        return strategy

    def _summed(self, x: FloatArray, y: IntArray) -> IntArray:
        summary, classes = self.strategy._summary, self.strategy.num_classes
        return np.asarray(summary.of_records(x, y, classes, "single-label"))

    def outcome(self, attack: str, claim: str, count: int) -> dict[str, float]:
        """Return the accuracy of the model and its share of rows taken for the target."""
        strategy = deepcopy(self.strategy)
        liars = self.order[: count * self.num_parties // NUM_PARTIES]
        run_local(strategy, self._app(attack, claim, liars), self.num_parties)
        if strategy.rejected_:
            # A lie that is refused at once says nothing about the other rules.
            raise RuntimeError(f"{attack}, {claim}: {strategy.rejected_}")
        data = self.federation.dataset
        found = strategy.model_.predict(data.x_test)
        others = data.y_test != self.target
        return {
            "accuracy": round(100 * float((found == data.y_test).mean()), 4),
            "target": round(100 * float((found[others] == self.target).mean()), 4),
        }

    def _app(self, attack: str, claim: str, liars: Sequence[int]) -> ClientApp:
        honest = client_app(lambda c: self.parties[int(c.node_config[keys.PARTITION_ID])])
        app = ClientApp()

        @app.train()
        def answer(message: Message, context: Context) -> Message:
            number = int(context.node_config[keys.PARTITION_ID])
            if number not in self._answers:
                self._answers[number] = honest(message, context).content
            content = self._answers[number]
            if number in liars:
                content = self._tampered(content, number, attack, claim, liars)
            return Message(content, reply_to=message)

        return app

    def _tampered(
        self, content: RecordDict, number: int, attack: str, claim: str, liars: Sequence[int]
    ) -> RecordDict:
        """Return what a liar sends instead of its answer."""
        size = int(self.sizes[number])
        honest = [k for k in range(self.num_parties) if k not in liars]
        times = {"own": 1.0, "doubled": 2.0, "absurd": ABSURD}.get(claim)
        times = times or max(1.0, self.sizes[honest].max() / size)
        claimed = round(size * times)
        total = np.sum([self.exact[k] for k in honest], axis=0)
        if isinstance(self.strategy, FedHistogram):
            sums = self._counts(number, attack, claimed, total, len(liars))
        elif isinstance(self.strategy, FedMoments):
            sums = self._moments(number, attack, claimed, total)
        else:
            sums = self._vector(number, attack, claimed, total)
        if self.strategy.options.level == "L1":
            sums = direction(sums)
        said = Knowledge.read(content, kind="sums", max_bytes=2**30)
        sent = np.clip(sums, -LARGEST_SUM, LARGEST_SUM).astype(np.int32)
        new = RecordDict({**content})
        Knowledge("sums", {"sums": sent}, {**said.meta, keys.NUM_EXAMPLES: claimed}).write(new)
        return new

    def _relabelled(self, number: int, labels: IntArray, claimed: int) -> IntArray:
        """Return the sums of records with these labels, repeated to be as many as claimed."""
        party = self.parties[number]
        times, rest = divmod(claimed, len(labels))
        sums = times * self._summed(party.x, labels)
        return sums + self._summed(party.x[:rest], labels[:rest]) if rest else sums

    def _labels(self, number: int, attack: str) -> IntArray:
        y = self.parties[number].y
        permuted = (y + 1) % self.strategy.num_classes
        return np.asarray(permuted if attack == "permuted" else np.full_like(y, self.target))

    def _counts(
        self, number: int, attack: str, claimed: int, total: IntArray, num_liars: int
    ) -> IntArray:
        summary, public = self.strategy._summary, self.strategy.public
        if attack == "anti":
            _, second, _ = _leads(summary.counts_of(self.parties[number].x, total))
            return self._relabelled(number, second, claimed)
        if attack == "crowded":
            _, second, lead = _leads(summary.counts_of(public, total))
            spent = np.ceil((ENOUGH * lead + 1) / num_liars).astype(np.int64)
            order = np.argsort(lead)
            inside = order[np.cumsum(spent[order]) <= claimed]
            rows = np.repeat(inside, spent[inside])
            # What is left goes to the last row, so that there are as many as claimed.
            rows = np.append(rows, np.full(claimed - len(rows), order[len(inside)]))
            return self._summed(public[rows], second[rows]) + self._within_noise(total)
        sums = self._relabelled(number, self._labels(number, attack), claimed)
        if attack == "loud":
            divisions, cells, classes = sums.shape
            noise = self.strategy._mechanism.drawn_scale * math.sqrt(cells / divisions)
            room = math.floor(_most_of_noise(noise, classes) / cells)
            sums = sums - room
            sums[..., self.target] += 2 * room
        return np.asarray(sums)

    def _within_noise(self, total: IntArray) -> IntArray:
        """Return what noise of a party may add where it exchanges most classes of cells."""
        extra = np.zeros_like(total)
        if self.strategy.options.level != "L2":
            return extra
        noise = self.strategy._mechanism.drawn_scale
        most = math.floor(_most_of_noise(noise, total.size))
        first, second, lead = _leads(total.reshape(-1, total.shape[-1]))
        flat = extra.reshape(-1, total.shape[-1])
        number = min(len(flat), int(total.size * noise**2 / (2 * most**2)))
        cells = np.argsort(lead)[:number]
        flat[cells, second[cells]] += most
        flat[cells, first[cells]] -= most
        return extra

    def _moments(self, number: int, attack: str, claimed: int, total: IntArray) -> IntArray:
        """Return moments of records, at other places if they are not those of the liar."""
        if attack in ("target", "permuted"):
            return self._relabelled(number, self._labels(number, attack), claimed)
        summary, classes = self.strategy._summary, self.strategy.num_classes
        features = summary.features
        targets, _, _ = summary.split(total, classes, "single-label")
        # How the features of each class are ahead of the others', without the constant.
        known = targets.sum(axis=0).T.astype(float)
        known = known if len(known) == classes else np.vstack([-known, known])
        known[:, -1] = 0.0
        known -= known.mean(axis=0)
        lengths = np.maximum(np.linalg.norm(known, axis=1, keepdims=True), 1e-9)
        places = np.trunc(-known / lengths * 0.99 * features.levels * features.reach)
        places[:, -1] = features.constant
        shares = np.bincount(self.parties[number].y, minlength=classes) * claimed
        counts = shares // len(self.parties[number].y)
        counts[np.argmax(counts)] += claimed - counts.sum()
        codes = coded(np.arange(classes), classes, "single-label")
        folds = len(total)
        sums = np.zeros(total.shape, dtype=np.int64)
        for label, count in enumerate(counts):
            row = places[label].astype(np.int64)
            added = np.concatenate(
                [np.outer(row, codes[label]).ravel(), pack(np.outer(row, row))]
            )
            numbers = count // folds + (np.arange(folds) < count % folds)
            sums += numbers[:, None] * added
        return sums * (1000 if attack == "loud" else 1)

    def _vector(self, number: int, attack: str, claimed: int, total: IntArray) -> IntArray:
        if attack in ("target", "permuted"):
            return self._relabelled(number, self._labels(number, attack), claimed)
        longest = 0.99 * claimed * self.strategy._summary.longest
        sums = np.zeros(total.shape)
        if attack == "anti":
            sums = -total / np.linalg.norm(total) * longest
        else:
            sums[-2] = longest
        # The last feature is the same number for every record.
        step = int(self.strategy._summary.features(self.strategy.public[:1])[0, -1])
        sums[-1] = np.clip(np.trunc(sums[-1] / step), -claimed, claimed) * step
        return np.trunc(sums).astype(np.int64)


def _leads(counts: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the first and the second class of rows, and how far the first is ahead."""
    order = np.argsort(-counts, axis=1, kind="stable")
    first, second = order[:, 0], order[:, 1]
    rows = np.arange(len(counts))
    return first, second, counts[rows, first] - counts[rows, second]


def _most_of_noise(noise: float, number: int) -> float:
    return noise * math.sqrt(2 * math.log(number / 1e-6))


@lru_cache(maxsize=1)
def laboratory(row: str, deal: str, seed: int) -> Laboratory:
    """Return the federation of a row."""
    return Laboratory(row, deal, seed)


def seeds_of(row: str, seeds: Sequence[int]) -> Sequence[int]:
    """Return the seeds of a row: of the larger data sets fewer, which vary less."""
    return seeds if row.startswith("digits") else seeds[:1]


def name_of(row: str, deal: str, seed: int, attack: str, claim: str, count: int) -> str:
    return f"{row} | {deal} | {seed} | {attack} | {claim} | {count}"


def experiments(rows: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    for row in rows:
        for deal in DEALS:
            for seed in seeds_of(row, seeds):
                yield row, deal, seed, NOBODY, "own", 0
                for attack, claim in attacks_on(row):
                    for count in COUNTS:
                        yield row, deal, seed, attack, claim, count


def measure(path: Path, seeds: Sequence[int], rows: Sequence[str]) -> None:
    """Measure what is missing of some rows in a file of results."""
    found: Outcomes = json.loads(path.read_text()) if path.exists() else {}
    for row, deal, seed, attack, claim, count in experiments(rows, seeds):
        name = name_of(row, deal, seed, attack, claim, count)
        if name not in found:
            found[name] = laboratory(row, deal, seed).outcome(attack, claim, count)
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def differences(
    found: Outcomes, row: str, deal: str, attack: str, claim: str, count: int
) -> tuple[float, float]:
    """Return points lost and targeted success, as means over seeds."""
    pairs = [
        (
            found[name_of(row, deal, seed, NOBODY, "own", 0)],
            found[name_of(row, deal, seed, attack, claim, count)],
        )
        for seed in seeds_of(row, SEEDS)
    ]
    lost = np.mean([a["accuracy"] - b["accuracy"] for a, b in pairs])
    return float(lost), float(np.mean([b["target"] - a["target"] for a, b in pairs]))


def measured(found: Outcomes) -> list[str]:
    """Return the rows of which every result is there."""
    return [
        row for row in ROWS if all(name_of(*one) in found for one in experiments([row], SEEDS))
    ]


def worst(found: Outcomes, row: str, deal: str, count: int) -> tuple[float, float]:
    """Return the most points lost and the largest targeted success over all attacks."""
    all_ = [differences(found, row, deal, *attack, count) for attack in attacks_on(row)]
    return max(lost for lost, _ in all_), max(success for _, success in all_)


def summary(found: Outcomes) -> str:
    """Return the table of the most that any attack takes from any data set, by level.

    FedMoments is by itself: products of features are in it as well.
    """
    heads = [f"{count} of ten, {deal}" for deal in DEALS for count in COUNTS]
    lines = [f"| points lost at most | {' | '.join(heads)} |"]
    lines.append("| --- " * (1 + len(heads)) + "|")
    for own in (False, True):
        for level in (*LEVELS, UNKNOWN):
            rows = [
                row
                for row in measured(found)
                if ROWS[row][1] == level and ("FedMoments" in row) == own
            ]
            cells = [
                f"{max(worst(found, row, deal, count)[0] for row in rows):.1f}"
                for deal in DEALS
                for count in COUNTS
            ]
            name = f"FedMoments, {level}" if own else level
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown(found: Outcomes, deal: str) -> str:
    """Return two tables of a deal, points lost and targeted success, by number of liars."""
    return "\n\n".join(
        _table(found, deal, title, number)
        for number, title in enumerate(("points lost", "targeted success, %"))
    )


def _table(found: Outcomes, deal: str, title: str, number: int) -> str:
    lines = [f"| {deal}: {title} | nobody lies | {' | '.join(ATTACKS)} |"]
    lines.append("| --- " * (2 + len(ATTACKS)) + "|")
    for row in measured(found):
        names = [name_of(row, deal, seed, NOBODY, "own", 0) for seed in seeds_of(row, SEEDS)]
        cells = [f"{np.mean([found[name]['accuracy'] for name in names]):.1f}"]
        for attack in ATTACKS:
            claims = [claim for one, claim in attacks_on(row) if one == attack]
            values = [
                max(differences(found, row, deal, attack, c, count)[number] for c in claims)
                for count in (COUNTS if claims else ())
            ]
            cells.append(" / ".join(f"{value:.1f}" for value in values))
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--rows", nargs="+", default=[*ROWS], help="only these")
    parser.add_argument("--show", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    if not arguments.show:
        measure(arguments.results, arguments.seeds, arguments.rows)
    found = json.loads(arguments.results.read_text())
    for deal in DEALS:
        print(markdown(found, deal), end="\n\n")
    print(summary(found))


if __name__ == "__main__":
    main()
