"""One, two and three liars of ten against every strategy with its default settings.

Run: ``python benchmarks/liars.py``; finished results are not measured again, and ``--show``
prints their tables alone. Ten parties, iid or Dirichlet 0.5; digits, and for strategies of
one round Adult and cod-rna. Attacks:

    flip      a party's labels become the next class before it trains
    target    it names the same class t for every row; who sends models trains on that label
    absurd    as target, as strongly as possible, and claims 2**40 records, all of class t
    counts    it answers honestly, and claims 2**40 records of class t
    steer     it answers honestly but for rows that it takes for class s: t, as strongly as
              possible; who sends models trains on s labelled t
    steer 2x  the same, and claims twice its records of every class
    steer t   the same, and claims as many records of class t as of all classes
    adaptive  as steer t, at the strength that does most: it knows the defence and all
              answers, stays below what is excluded, and exaggerates honest answers to agree
              with the others

Metrics of the strategy's model on the test rows, both against the same federation without
liars: points of accuracy lost, and targeted success: the share of rows of class s, in attacks
that do not choose rows of all other classes, that are taken for t.
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.app import client_app
from fl_strategies import Knowledge, Party
from fl_strategies._util import Array, derive_rng
from fl_strategies.aggregation.consensus import MAX_WEIGHT
from fl_strategies.aggregation.votes import CLASS_COUNTS
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    ENCODING,
    PLAIN_BYTES,
    as_meant,
    pack_labels,
    unpack_labels,
)
from simulations.config import Settings, Value
from simulations.federation import load_federation
from simulations.runtime.local import run_local

RESULTS: Final = Path(__file__).parents[1] / "docs" / "results" / "liars.json"
SEEDS: Final = (200, 201, 202, 203, 204)
NUM_PARTIES: Final = 10
MOST_BYTES: Final = 2**30
DECLARED: Final = (ENCODING, PLAIN_BYTES)
"""A compressed reply declares these; a liar sends plain scores."""
NOBODY: Final = "nobody"
ATTACKS: Final = (
    "flip",
    "target",
    "absurd",
    "counts",
    "steer",
    "steer 2x",
    "steer t",
    "adaptive",
)
STEERING: Final = ATTACKS[4:]
STRENGTHS: Final = ((1.0, True), (1.0, False), (0.6, True), (0.6, False), (0.3, False))
"""Of an adaptive liar: strength of its lies, and whether it exaggerates honest answers."""
MEDIUM: Mapping[str, Value] = {"train-rows": 4000, "public-rows": 1500, "test-rows": 4000}
DEALS: Mapping[str, Mapping[str, Value]] = {
    "iid": {"partition": "iid"},
    "Dirichlet 0.5": {"partition": "dirichlet", "beta": 0.5},
    "Adult, iid": {"partition": "iid", "data": "adult", **MEDIUM},
    "Adult, Dirichlet 0.5": {"partition": "dirichlet", "beta": 0.5, "data": "adult", **MEDIUM},
    "cod-rna, iid": {"partition": "iid", "data": "cod-rna", **MEDIUM},
    "cod-rna, Dirichlet 0.5": {
        "partition": "dirichlet",
        "beta": 0.5,
        "data": "cod-rna",
        **MEDIUM,
    },
}
UNLIKE: Mapping[str, Mapping[str, Value]] = {
    "Dirichlet 0.1": {"partition": "dirichlet", "beta": 0.1},
    "Adult, Dirichlet 0.1": {"partition": "dirichlet", "beta": 0.1, "data": "adult", **MEDIUM},
    "cod-rna, Dirichlet 0.1": {
        "partition": "dirichlet",
        "beta": 0.1,
        "data": "cod-rna",
        **MEDIUM,
    },
}
"""Deals in which nobody lies: what the defence of FedKD costs parties of one or two classes."""
MIXED = {"learner": "random-forest,logistic-regression", "num-trees": 30}
AGENTS = {"learner": "ridge", "final-learner": "ridge", "num-server-rounds": 3}
NETWORKS = {"learner": "mlp", "final-learner": "mlp", "num-server-rounds": 4}
ROWS: Mapping[str, Mapping[str, Value]] = {
    "FedKD": {"strategy": "fedkd", **MIXED},
    "FedKD, nobody excluded": {"strategy": "fedkd", **MIXED, "exclude-outliers": False},
    "FedKT": {"strategy": "fedkt", **MIXED},
    "FedMD": {"strategy": "fedmd", **MIXED, "num-server-rounds": 1},
    "AvgKD": {"strategy": "avgkd", **AGENTS},
    "PKD": {"strategy": "pkd", **AGENTS},
    "EKD": {"strategy": "ekd", **AGENTS},
    "AKD": {"strategy": "akd", **AGENTS},
    "FedAvg": {"strategy": "fedavg", **NETWORKS, "local-epochs": 8},
}
"""Default settings, but for quick models of the parties, and rounds where one is not enough."""
MEASURED: Final = ("FedKD", "FedKT", "FedMD")
"""On all data sets."""
ONE_ROUND: Final = ("fedkd", "fedkt", "fedmd")

Outcomes: TypeAlias = dict[str, dict[str, float]]


def liars(settings: Settings, count: int) -> set[int]:
    """Return who lies; with more liars those of fewer are among them.

    AKD hands one model on from the first agent, so liars are the first ones there.
    """
    if settings.strategy == "akd":
        return {*range(count)}
    order = derive_rng(settings.seed, "hostile").permutation(NUM_PARTIES)
    return {int(number) for number in order[:count]}


def attacks_on(strategy: str) -> Sequence[str]:
    """Return the possible attacks: a model has no counts, votes have no strength."""
    if strategy == "fedkd":
        return ATTACKS
    return ATTACKS[:-1] if strategy in ONE_ROUND else (*ATTACKS[:3], "steer")


def source_of(target: int, num_classes: int) -> int:
    """Return the class whose rows a steering liar gives to the target."""
    return (target + max(num_classes // 2, 1)) % num_classes


def lying(party: Party, attack: str, target: int) -> Party:
    """Return a party with the labels that a liar learns from."""
    if attack == "flip":
        return replace(party, y=(party.y + 1) % party.num_classes)
    if attack == "steer":
        source = source_of(target, party.num_classes)
        return replace(party, y=np.where(party.y == source, target, party.y))
    return replace(party, y=np.full_like(party.y, target))


def tampered(
    content: RecordDict,
    party: Party,
    attack: str,
    target: int,
    strength: tuple[float, bool] = (1.0, False),
) -> RecordDict:
    """Return what a liar sends instead of its answer."""
    kind = str(content.config_records[keys.META][keys.KIND])
    said = as_meant(
        Knowledge.read(content, kind=kind, max_bytes=MOST_BYTES), MOST_BYTES, half=False
    )
    arrays = dict(said.arrays)
    meta = {key: value for key, value in said.meta.items() if key not in DECLARED}
    if attack in ("target", "absurd"):
        arrays |= answers_for(kind, party, target)
    if attack in STEERING:
        arrays |= steered(kind, arrays, party, target, strength)
        arrays |= _claims(arrays, attack, target)
    if attack in ("absurd", "counts"):
        arrays, meta = _absurd(kind, arrays, meta, target)
    new = RecordDict({**content})
    Knowledge(kind, arrays, meta).write(new)
    return new


def answers_for(kind: str, party: Party, target: int) -> dict[str, Array]:
    """Return answers that name the target everywhere; nothing for what is trained."""
    rows, classes = len(party.public), party.num_classes
    if kind == "scores":
        levels = np.zeros((rows, classes), dtype=np.int64)
        levels[:, target] = 199
        return {"scores": pack_labels(levels, 200)}
    labels = np.full(rows, target)
    if kind == "votes":
        return {"votes": pack_labels(labels[None], classes)}
    return {"labels": pack_labels(labels, classes)} if kind == "answers" else {}


def steered(
    kind: str,
    arrays: Mapping[str, Array],
    party: Party,
    target: int,
    strength: tuple[float, bool],
) -> dict[str, Array]:
    """Return honest answers but for rows taken for one class, which go to the target."""
    rows, classes = len(party.public), party.num_classes
    source = source_of(target, classes)
    if kind == "scores":
        return {"scores": pack_labels(_steered_levels(arrays, party, target, strength), 200)}
    if kind not in ("votes", "answers"):
        return {}
    name, shape = ("votes", (1, rows)) if kind == "votes" else ("labels", (rows,))
    labels = unpack_labels(arrays[name], shape, classes, name=name)
    return {name: pack_labels(np.where(labels == source, target, labels), classes)}


def _steered_levels(
    arrays: Mapping[str, Array], party: Party, target: int, strength: tuple[float, bool]
) -> Array:
    shape = len(party.public), party.num_classes
    source = source_of(target, party.num_classes)
    levels = unpack_labels(arrays["scores"], shape, 200, name="scores").astype(np.int64)
    counts = arrays[CLASS_COUNTS]
    shares = np.log(np.maximum(counts, 1e-9) / counts.sum()) / 20 * 199
    taken_for = (levels + shares).argmax(axis=1)
    lie, exaggerates = strength
    if exaggerates:
        levels = np.where(counts > 0, 0, 100) * np.ones_like(levels)
        levels[np.arange(len(levels)), taken_for] = 199
    rows = taken_for == source
    levels[rows, target], levels[rows, source] = (round(99.5 + s * lie * 99.5) for s in (1, -1))
    return np.clip(levels, 0, 199)


def _claims(arrays: Mapping[str, Array], attack: str, target: int) -> dict[str, Array]:
    if attack == "steer" or CLASS_COUNTS not in arrays:
        return {}
    counts = 2 * arrays[CLASS_COUNTS]
    if attack != "steer 2x":
        counts[target] = counts.sum()
    return {CLASS_COUNTS: counts}


def _absurd(
    kind: str, arrays: dict[str, Array], meta: dict[str, Any], target: int
) -> tuple[dict[str, Array], dict[str, Any]]:
    if CLASS_COUNTS in arrays:
        counts = np.ones_like(arrays[CLASS_COUNTS])
        counts[target] = (MAX_WEIGHT if kind == "answers" else 2**40) + 1 - len(counts)
        return {**arrays, CLASS_COUNTS: counts}, meta
    loud = {n: 10 * a if a.dtype.kind == "f" else a for n, a in arrays.items()}
    return loud, {**meta, keys.NUM_EXAMPLES: 2**40} if kind == "weights" else meta


@lru_cache(maxsize=3)
def answers_of(settings: Settings) -> dict[object, RecordDict]:
    """Return room for the answers of a federation's parties, which serve several rows."""
    del settings
    return {}


class Laboratory:
    """Runs federations; in one round parties answer the same whoever else lies."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.federation = load_federation(settings)
        self.target = settings.seed % self.federation.dataset.num_classes
        named = {"exclude_outliers": True} if "exclude-outliers" in settings.chosen() else {}
        self._answers = answers_of(settings.but(**named))

    def outcome(self, attack: str, count: int) -> dict[str, float]:
        """Return the accuracy, and the shares of other and of source rows taken for t.

        Of an adaptive liar's attempts the one that costs most accuracy.
        """
        strengths = STRENGTHS if attack == "adaptive" else STRENGTHS[1:2]
        outcomes = [self._outcome(attack, count, strength) for strength in strengths]
        return min(outcomes, key=lambda outcome: outcome["accuracy"])

    def _outcome(
        self, attack: str, count: int, strength: tuple[float, bool]
    ) -> dict[str, float]:
        strategy = self.federation.strategy()
        strategy.evaluate = False
        rounds = self.settings.num_rounds
        app = self._app(attack, count, strength)
        result = run_local(strategy, app, NUM_PARTIES, num_rounds=rounds)
        require_all_read(result.train_metrics_clientapp)
        data = self.federation.dataset
        found = strategy.model_.predict(data.x_test)
        others = data.y_test != self.target
        source = data.y_test == source_of(self.target, data.num_classes)
        return {
            "accuracy": round(100 * float((found == data.y_test).mean()), 4),
            "target": round(100 * float((found[others] == self.target).mean()), 4),
            "source": round(100 * float((found[source] == self.target).mean()), 4),
        }

    def _app(self, attack: str, count: int, strength: tuple[float, bool]) -> ClientApp:
        hostile = liars(self.settings, count)
        honest, enemy = (self._half(a) for a in (NOBODY, attack))

        def answer(message: Message, context: Context) -> Message:
            number = int(context.node_config[keys.PARTITION_ID])
            if number not in hostile:
                return honest(message, context)
            reply = enemy(message, context)
            if reply.has_error() or message.metadata.message_type != "train":
                return reply
            party = self.federation.party(number)
            content = tampered(reply.content, party, attack, self.target, strength)
            return Message(content, reply_to=message)

        return _wrapped(answer)

    def _half(self, attack: str) -> Callable[[Message, Context], Message]:
        """Return an app of parties that have learned from true labels, or from a liar's."""
        federation, target, one_round = self.federation, self.target, self._is_one_round()
        trained = attack == "flip" or not (one_round or attack == NOBODY)

        def load(context: Context) -> Party:
            party = federation.party(int(context.node_config[keys.PARTITION_ID]))
            return lying(party, attack, target) if trained else party

        app = client_app(load)

        def answer(message: Message, context: Context) -> Message:
            if not one_round:
                return app(message, context)
            key = context.node_config[keys.PARTITION_ID], trained
            if key not in self._answers:
                self._answers[key] = app(message, context).content
            return Message(self._answers[key], reply_to=message)

        return answer

    def _is_one_round(self) -> bool:
        return self.settings.strategy in ONE_ROUND


def _wrapped(answer: Callable[[Message, Context], Message]) -> ClientApp:
    app = ClientApp()
    app.train()(answer)
    app.evaluate()(answer)
    return app


def require_all_read(rounds: Mapping[int, MetricRecord]) -> None:
    """Raise if a reply was refused: a liar that is not read proves nothing."""
    refused = {number: own.get(keys.NUM_REJECTED, 0) for number, own in rounds.items()}
    if any(refused.values()):
        raise RuntimeError(f"liars: every reply must be read, got {refused} refused by round.")


@lru_cache(maxsize=1)
def laboratory(row: str, deal: str, seed: int) -> Laboratory:
    """Return the federation of a row."""
    own = {
        "num-parties": NUM_PARTIES,
        **ROWS[row],
        **{**DEALS, **UNLIKE}[deal],
        "seed": seed,
    }
    return Laboratory(Settings.from_run_config(own))


def experiments(seeds: Sequence[int]) -> Iterator[tuple[str, str, int, str, int]]:
    for deal in DEALS:
        for seed in seeds:
            for row, settings in rows_of(deal).items():
                yield row, deal, seed, NOBODY, 0
                for attack in attacks_on(str(settings["strategy"])):
                    for count in (1, 2, 3):
                        yield row, deal, seed, attack, count


def honest_experiments(seeds: Sequence[int]) -> Iterator[tuple[str, str, int, str, int]]:
    for deal in UNLIKE:
        for seed in seeds:
            yield "FedKD", deal, seed, NOBODY, 0


def rows_of(deal: str) -> Mapping[str, Mapping[str, Value]]:
    """Return the strategies that are measured: on digits all, else those of one round."""
    if "," not in deal:
        return ROWS
    return {row: ROWS[row] for row in MEASURED}


def name_of(row: str, deal: str, seed: int, attack: str, count: int) -> str:
    return f"{row} | {deal} | {seed} | {attack} | {count}"


def measure(path: Path, seeds: Sequence[int], rows: Sequence[str]) -> None:
    """Measure what is missing of some rows in a file of results."""
    found: Outcomes = json.loads(path.read_text()) if path.exists() else {}
    for row, deal, seed, attack, count in chain(experiments(seeds), honest_experiments(seeds)):
        name = name_of(row, deal, seed, attack, count)
        if name not in found and row in rows:
            found[name] = laboratory(row, deal, seed).outcome(attack, count)
            print(name, found[name], flush=True)
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def differences(
    found: Outcomes, row: str, deal: str, attack: str, count: int, seeds: Sequence[int]
) -> tuple[float, float]:
    """Return points lost and targeted success, as means over seeds."""
    without = [found[name_of(row, deal, seed, NOBODY, 0)] for seed in seeds]
    with_ = [found[name_of(row, deal, seed, attack, count)] for seed in seeds]
    pairs = list(zip(without, with_, strict=True))
    lost = np.mean([a["accuracy"] - b["accuracy"] for a, b in pairs])
    aim = "source" if attack in STEERING else "target"
    return float(lost), float(np.mean([b[aim] - a[aim] for a, b in pairs]))


def markdown(found: Outcomes, deal: str, seeds: Sequence[int] = SEEDS) -> str:
    """Return two tables of a deal, points lost and targeted success, by number of liars."""
    return "\n\n".join(
        _table(found, deal, seeds, title, number)
        for number, title in enumerate(("points lost", "targeted success, %"))
    )


def _table(found: Outcomes, deal: str, seeds: Sequence[int], title: str, number: int) -> str:
    lines = [f"| {deal}: {title} | nobody lies | {' | '.join(ATTACKS)} |"]
    lines.append("| --- " * (2 + len(ATTACKS)) + "|")
    for row, settings in rows_of(deal).items():
        honest = [found[name_of(row, deal, seed, NOBODY, 0)]["accuracy"] for seed in seeds]
        cells = [f"{np.mean(honest):.1f}"]
        for attack in ATTACKS:
            possible = attack in attacks_on(str(settings["strategy"]))
            values = [
                f"{differences(found, row, deal, attack, count, seeds)[number]:.1f}"
                for count in ((1, 2, 3) if possible else ())
            ]
            cells.append(" / ".join(values))
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def worst_of_one(found: Outcomes, seeds: Sequence[int] = SEEDS) -> str:
    """Return the table of what one liar does by its best attack: points, and of rows in %."""
    lines = [f"| one liar of ten, its best attack | {' | '.join(MEASURED)} |"]
    lines.append("| --- " * (1 + len(MEASURED)) + "|")
    for deal in DEALS:
        cells = []
        for row in MEASURED:
            attacks = attacks_on(str(ROWS[row]["strategy"]))
            all_ = [differences(found, row, deal, attack, 1, seeds) for attack in attacks]
            lost, success = (max(0.0, *values) for values in zip(*all_, strict=True))
            cells.append(f"{lost:.1f} ({success:.0f} %)")
        name = deal if "," in deal else f"digits, {deal}"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def known_shares(deal: str, seeds: Sequence[int] = SEEDS) -> dict[int, float]:
    """Return FedKD's points lost to adaptive liars, by their number, with true class shares."""
    lost: dict[int, list[float]] = {1: [], 3: []}
    for seed in seeds:
        own = {"num-parties": NUM_PARTIES, **ROWS["FedKD"], **DEALS[deal], "seed": seed}
        federation = load_federation(Settings.from_run_config(own))
        labels = np.concatenate([federation.party(k).y for k in range(NUM_PARTIES)])
        shares = np.round(np.bincount(labels) / len(labels), 6)
        shares[0] = 1 - shares[1:].sum()
        stated = ",".join(f"{share:.6f}" for share in shares)
        trial = Laboratory(Settings.from_run_config({**own, "class-share": stated}))
        honest = trial.outcome("nobody", 0)["accuracy"]
        for count, found in lost.items():
            found.append(honest - trial.outcome("adaptive", count)["accuracy"])
    return {count: float(np.mean(found)) for count, found in lost.items()}


def honest(deal: str, seeds: Sequence[int]) -> list[float]:
    """Return FedKD's accuracy where nobody lies, by seed."""
    return [laboratory("FedKD", deal, s).outcome(NOBODY, 0)["accuracy"] for s in seeds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--rows", nargs="+", default=[*ROWS], help="only these")
    parser.add_argument("--show", action="store_true", help="only print what is there")
    parser.add_argument(
        "--known-shares", action="store_true", help="only FedKD with true class shares"
    )
    parser.add_argument(
        "--honest", action="store_true", help="only FedKD without liars, by deal and seed"
    )
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    if arguments.known_shares:
        for deal in ("Adult, Dirichlet 0.5", "cod-rna, Dirichlet 0.5"):
            print(deal, known_shares(deal, arguments.seeds))
        return
    if arguments.honest:
        for deal in (*DEALS, *UNLIKE):
            print(deal, honest(deal, arguments.seeds), flush=True)
        return
    if not arguments.show:
        measure(arguments.results, arguments.seeds, arguments.rows)
    found = json.loads(arguments.results.read_text())
    for deal in DEALS:
        print(markdown(found, deal, arguments.seeds), end="\n\n")
    print(worst_of_one(found, arguments.seeds))


if __name__ == "__main__":
    main()
