"""What parties with exchanged labels do to a federation, and what robust rules save.

Run: ``python benchmarks/poisoning.py [case ...] [--seeds 3] [--first-seed 0]``. Real data, real
messages, the in-process runner. In every case 20 % of the parties are hostile, drawn by the
seed. Adult needs the folder that ``FL_STRATEGIES_DATA`` names and is skipped without it.

Attacks
    flip      a hostile party keeps to the protocol, but its label y is (y + 1) mod C
    collude   hostile parties also pool their records, so that they say the same everywhere
    same      every label of a hostile party is 0
    loud      as flip, and the scores that it sends are as extreme as the format allows

    away      the yardstick: they send nothing, so nobody knows what their records could teach

Accuracy is that of the final model on the test rows (FedKT, FedKD), or the mean over the
honest parties' own models at the end (FedMD). Rules of one case differ in nothing else: same
seeds, same records, same hostile parties.
"""

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TypeAlias

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.app import client_app
from fl_strategies import (
    REGISTRY,
    FedKT,
    Knowledge,
    Party,
)
from fl_strategies._util import Array, derive_rng
from fl_strategies.errors import InvalidData
from fl_strategies.party.role import PartyState
from fl_strategies.strategies.fedkd import FedKDParty
from fl_strategies.strategies.fedmd import FedMDParty
from fl_strategies.strategies.fedmd.options import SCORES, plain_limits
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Metrics, pack_labels, unpack_labels
from simulations.config import Settings, Value
from simulations.federation import Federation, load_federation
from simulations.runtime.local import run_local

SHARE_HOSTILE = 0.2
NOBODY, AWAY = "nobody", "away"

Table: TypeAlias = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Case:
    """A federation, what is done to it, and the rules that are compared; the first is plain."""

    attack: str
    settings: Mapping[str, Value]
    rules: Mapping[str, Mapping[str, Value]]

    def settings_of(self, seed: int, rule: str) -> Settings:
        """Return the settings of one run."""
        return Settings.from_run_config({**self.settings, **self.rules[rule], "seed": seed})


FOREST = {
    "strategy": "fedkt",
    "learner": "random-forest",
    "final-learner": "random-forest",
    "num-trees": 30,
    "num-parties": 10,
    "num-splits": 2,
    "num-teachers": 5,
    "corrected": False,
    "vote-weights": "none",
}
# The models of the FedKT paper for Adult.
ADULT = {**FOREST, "data": "adult", "teacher": "decision-tree", "max-depth": 6}
DIGITS = {**FOREST, "data": "digits"}
NETWORKS = {
    "strategy": "fedmd",
    "learner": "mlp",
    "final-learner": "mlp",
    "num-parties": 10,
    "num-server-rounds": 4,
}
FEWER = {"adult": {"train-rows": 2000, "public-rows": 500}}
VOTES = {"plain": {"trim-fraction": 0.0}, "trimmed": {"trim-fraction": 0.2}}
SCORE_RULES = {
    "mean": {"consensus": "mean"},
    "median": {"consensus": "median"},
    "trimmed-mean": {"consensus": "trimmed-mean", "trim-fraction": 0.2},
    "labels": {"consensus": "mean", "payload": "argmax"},
}
LOGIT_RULES = {
    **{
        name: {**SCORE_RULES[name], "weights": "uniform", "loss": "l1"}
        for name in ("mean", "median", "trimmed-mean")
    },
    "class-weighted mean": {"consensus": "mean", "weights": "counts", "loss": "l1"},
    "evidence": {"weights": "evidence"},
}
SERVER_RULES: Mapping[str, Mapping[str, Value]] = {
    "fedkt": {"trim_fraction": 0.0},
    "fedkd": {"consensus": "mean", "trim_fraction": 0.2},
}
"""What parties cannot tell: runs that differ in it alone have the same answers."""
DEALS: Mapping[str, Mapping[str, Value]] = {
    "iid": {"partition": "iid"},
    "dirichlet-0.5": {"partition": "dirichlet", "beta": 0.5},
    "dirichlet-0.1": {"partition": "dirichlet", "beta": 0.1, "min-records": 5},
}


def make_cases() -> dict[str, Case]:
    cases = {}
    for data, base in (("digits", DIGITS), ("adult", ADULT)):
        for deal, partition in DEALS.items():
            for attack in ("flip", "collude", "same"):
                name = f"fedkt-{data}-{deal}-{attack}"
                cases[name] = Case(attack, {**base, **partition}, VOTES)
    for data in ("digits", "adult"):
        for deal, partition in DEALS.items():
            for payload, attack in product(("softmax", "logits"), ("flip", "loud")):
                name = f"fedmd-{data}-{deal}-{payload}-{attack}"
                settings = {**NETWORKS, "data": data, "payload": payload, **partition}
                settings |= FEWER.get(data, {})
                cases[name] = Case(attack, settings, SCORE_RULES)
            for attack in ("flip", "loud"):
                settings = {**NETWORKS, "strategy": "fedkd", "data": data, **partition}
                settings |= {"num-server-rounds": 1} | FEWER.get(data, {})
                cases[f"fedkd-{data}-{deal}-{attack}"] = Case(attack, settings, LOGIT_RULES)
    return cases


CASES = make_cases()


def hostile_parties(settings: Settings, attack: str) -> set[int]:
    """Return who is hostile in a run; the same parties for every attack and rule."""
    if attack == NOBODY:
        return set()
    rng, num_parties = derive_rng(settings.seed, "hostile"), settings.num_parties
    count = round(SHARE_HOSTILE * num_parties)
    return {int(i) for i in rng.choice(num_parties, size=count, replace=False)}


def lying(party: Party, attack: str) -> Party:
    """Return a party whose labels are wrong."""
    wrong = np.zeros_like(party.y) if attack == "same" else (party.y + 1) % party.num_classes
    return replace(party, y=wrong)


def pool_records(party: Party, others: Sequence[Party]) -> Party:
    x = np.concatenate([other.x for other in others])
    return replace(party, x=x, y=np.concatenate([other.y for other in others]))


def shouted(scores: Array, low: float, high: float) -> Array:
    """Return extreme scores that name the same classes."""
    loud = np.full_like(scores, low)
    loud[np.arange(len(scores)), scores.argmax(axis=1)] = high
    return loud


def with_scores(said: Knowledge, scores: Array) -> Knowledge:
    return replace(said, arrays={**said.arrays, SCORES: scores})


class LoudMDParty(FedMDParty):
    """A party of FedMD that says what it says as loudly as the server will read."""

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Answer with the same classes as before, and extreme scores if scores are asked."""
        said, metrics = super().train(party, received, config, state)
        if SCORES not in said.arrays:
            return said, metrics
        scores = np.asarray(said.arrays[SCORES])
        limits = plain_limits("softmax" if scores.min() >= 0 else "logits")
        return with_scores(said, shouted(scores, *limits)), metrics


class LoudKDParty(FedKDParty):
    """The same of FedKD, whose scores are levels."""

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Answer with the same classes as before, at the lowest and the highest level."""
        said, metrics = super().train(party, received, config, state)
        levels, shape = int(config["num-levels"]), (len(party.public), party.num_classes)
        codes = unpack_labels(np.asarray(said.arrays[SCORES]), shape, levels)
        return with_scores(said, pack_labels(shouted(codes, 0, levels - 1), levels)), metrics


def attacked_app(federation: Federation, attack: str, hostile: set[int]) -> ClientApp:
    """Return the client app of a federation some of whose parties are hostile."""
    honest = client_app(lambda context: federation.party(_number(context)))
    allies = [federation.party(number) for number in sorted(hostile)]

    def load(context: Context) -> Party:
        if attack == AWAY:
            raise InvalidData("this party takes no part")
        party = federation.party(_number(context))
        if attack == "collude":
            party = pool_records(party, allies)
        return lying(party, attack)

    roles = {name: algorithm.party for name, algorithm in REGISTRY.items()}
    if attack == "loud":
        roles |= {"fedmd": LoudMDParty(), "fedkd": LoudKDParty()}
    enemy = client_app(load, roles=roles)

    def answer(message: Message, context: Context) -> Message:
        app = enemy if _number(context) in hostile else honest
        return app(message, context)

    return _wrapped(answer)


def _wrapped(answer: Callable[[Message, Context], Message]) -> ClientApp:
    app = ClientApp()
    app.train()(answer)
    app.evaluate()(answer)
    return app


def _number(context: Context) -> int:
    return int(context.node_config[keys.PARTITION_ID])


@dataclass(frozen=True)
class Outcome:
    """What came out of one run."""

    accuracy: float
    caught: float = np.nan
    """Share of hostile parties that were excluded; NaN for rules that exclude nobody."""


class Laboratory:
    """Runs federations, and remembers what need not be worked out again.

    A run without an attack serves all attacks. In one round nobody knows what others say or
    how the server will combine it, so honest parties answer the same whether others are
    hostile or not, and all of them answer the same to every rule.
    """

    def __init__(self) -> None:
        self._outcomes: dict[object, Outcome] = {}
        self._answers: dict[object, RecordDict] = {}

    def outcome(self, case: Case, rule: str, seed: int, attack: str) -> Outcome:
        """Return what a run came to, from memory if it was run before."""
        settings = case.settings_of(seed, rule)
        key = settings, attack
        if key not in self._outcomes:
            run = self._run_rounds if settings.strategy == "fedmd" else self._run_once
            self._outcomes[key] = run(settings, attack)
        return self._outcomes[key]

    def _run_once(self, settings: Settings, attack: str) -> Outcome:
        federation, hostile = load_federation(settings), hostile_parties(settings, attack)
        strategy = federation.strategy()
        strategy.evaluate = False
        app = self._remembering(attacked_app(federation, attack, hostile), settings, attack)
        run_local(strategy, app, settings.num_parties)
        accuracy = federation.quality(strategy.model_)
        if not isinstance(strategy, FedKT) or not strategy.options.trim_fraction or not hostile:
            return Outcome(accuracy)
        return Outcome(accuracy, len(hostile & {*strategy.trimmed_}) / len(hostile))

    def _remembering(self, app: ClientApp, settings: Settings, attack: str) -> ClientApp:
        hostile = hostile_parties(settings, attack)
        asked = settings.but(**SERVER_RULES[settings.strategy])

        def answer(message: Message, context: Context) -> Message:
            number = _number(context)
            if number in hostile and attack == AWAY:
                return app(message, context)
            key = asked, number, attack if number in hostile else ""
            if key not in self._answers:
                self._answers[key] = app(message, context).content
            return Message(self._answers[key], reply_to=message)

        return _wrapped(answer)

    def _run_rounds(self, settings: Settings, attack: str) -> Outcome:
        federation, hostile = load_federation(settings), hostile_parties(settings, attack)
        result = run_local(
            federation.strategy(),
            attacked_app(federation, attack, hostile),
            settings.num_parties,
            num_rounds=settings.num_rounds,
        )
        measured = result.evaluate_metrics_clientapp[settings.num_rounds]
        ids, figures = (measured[name] for name in ("partition-ids", "accuracy-by-party"))
        others = hostile_parties(settings, "any")
        honest = [f for i, f in zip(ids, figures, strict=True) if int(i) not in others]
        return Outcome(float(np.mean(honest)))


def measure(case: Case, seeds: Sequence[int], laboratory: Laboratory) -> Table:
    """Return percentages by rule: accuracies, and how many hostile parties were excluded."""
    table: Table = {}
    for rule in case.rules:
        nobody, hostile = (
            [laboratory.outcome(case, rule, seed, attack) for seed in seeds]
            for attack in (NOBODY, case.attack)
        )
        table[rule] = {
            "nobody": [100 * run.accuracy for run in nobody],
            "hostile": [100 * run.accuracy for run in hostile],
            "caught": [100 * run.caught for run in hostile],
        }
    plain = next(iter(case.rules))
    away = [laboratory.outcome(case, plain, seed, AWAY) for seed in seeds]
    table[plain]["away"] = [100 * run.accuracy for run in away]
    return table


def _figure(values: Sequence[float]) -> str:
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1) if len(values) > 1 else 0:.1f}"


def rows_of(name: str, table: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Return a line for each rule; what is lost is lost to the first rule, the plain one."""
    plain = next(iter(table.values()))
    best, away = np.array(plain["nobody"]), np.array(plain["away"])
    lines = []
    for rule, figures in table.items():
        nobody, hostile = np.array(figures["nobody"]), np.array(figures["hostile"])
        caught = float(np.mean(figures["caught"]))
        left_out = "" if np.isnan(caught) else f"{caught:.0f} %"
        columns = nobody, hostile, best - nobody, best - hostile, away - hostile
        lines.append(f"| {' | '.join([name, rule, *map(_figure, columns), left_out])} |")
    return lines


HEADER = (
    "| case | rule | nobody hostile | 20 % hostile | cost if nobody is hostile | loss | "
    "loss, had the hostile ones stayed away | liars excluded |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def is_adult(name: str) -> bool:
    return CASES[name].settings["data"] == "adult"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="beginnings of names; all by default")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    chosen = [n for n in CASES if not arguments.cases or n.startswith((*arguments.cases,))]
    if any(is_adult(name) for name in chosen) and not os.environ.get("FL_STRATEGIES_DATA"):
        print("Adult is skipped: FL_STRATEGIES_DATA names no folder.")
        chosen = [name for name in chosen if not is_adult(name)]
    print(HEADER, flush=True)
    tables, start, laboratory = {}, time.monotonic(), Laboratory()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for name in chosen:
        tables[name] = measure(CASES[name], seeds, laboratory)
        print("\n".join(rows_of(name, tables[name])), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    print(f"seeds {seeds[0]} to {seeds[-1]}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
