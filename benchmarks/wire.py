"""Bytes of scores, votes and models on the wire, and the time to compress them.

Run: python -m benchmarks.wire [--repeats N]
Prints JSON. Replies are those of real parties, counted as Flower counts them, with names and
metrics and all; times are processor seconds, medians of the repeats.
"""

import argparse
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message

from benchmarks.machine import seconds
from clients.app import client_app
from fl_strategies._util import Array
from fl_strategies.wire import keys
from fl_strategies.wire import knowledge as wire
from fl_strategies.wire.knowledge import (
    ENCODING,
    ENCODINGS,
    SCORES,
    Knowledge,
    Quantizer,
    as_meant,
    as_offered,
    count_bytes,
    decode_array,
    pack_labels,
    unpack_labels,
)
from simulations.config import Settings, Value
from simulations.federation import load_federation
from simulations.runtime.local import InMemoryGrid

LEVELS = Quantizer(num_levels=200, bound=10.0)
SHAPE = 50_000, 10
SIZES = (12_500, 25_000, 50_000, 100_000)
SAME: Mapping[str, Value] = {"num-parties": 2, "train-rows": 2000, "max-wait": 1.0, "epochs": 3}
FEDKD: Mapping[str, Mapping[str, Value]] = {
    "adult": {"learner": "mlp", "final-learner": "mlp"},
    "mnist": {"learner": "mlp", "final-learner": "mlp"},
    "digits": {"learner": "mlp", "final-learner": "mlp", "train-rows": 0},
}
FEDKT: Mapping[str, Mapping[str, Value]] = {
    "adult, forest": {"data": "adult", "learner": "random-forest", "max-depth": 6},
    "mnist, perceptron": {"data": "mnist", "learner": "mlp", "epochs": 1},
    "mnist, convolutions": {"data": "mnist", "learner": "convolutional", "epochs": 1},
}
"""The models of FedKT's paper."""


def measure(repeats: int) -> dict[str, Any]:
    """Return all figures, by what they are about."""
    return {
        "scores": scores(repeats),
        "labels": labels(repeats),
        "half-precision": half_precision(),
        "fedkd-replies": {name: fedkd_reply(name) for name in FEDKD},
        "one-shot-uploads": {name: upload(name) for name in FEDKT},
    }


# Scores of no party in particular.


def codes_of(rows: int, num_levels: int = 200) -> Array:
    logits = np.random.default_rng(0).normal(0.0, 2.1, (rows, SHAPE[1]))
    levels = Quantizer(num_levels=num_levels, bound=LEVELS.bound)
    return levels.to_wire(logits, np.random.default_rng(0))


def scores(repeats: int) -> dict[str, Any]:
    plain, exact = codes_of(SHAPE[0]), 8 * SHAPE[0] * SHAPE[1]
    found: dict[str, Any] = {"rows": SHAPE[0], "classes": SHAPE[1], "float64-bytes": exact}
    for encoding in wire.readable():
        knowledge = Knowledge("", {SCORES: plain})
        small = as_offered(knowledge, {ENCODINGS: encoding})
        packing, reading = seconds(
            repeats, *_both_ways(knowledge, small, encoding, plain.nbytes)
        )
        found[encoding] = {
            "bytes": small.arrays[SCORES].nbytes,
            "times-smaller-than-float64": exact / small.arrays[SCORES].nbytes,
            "times-smaller-than-codes": plain.nbytes / small.arrays[SCORES].nbytes,
            "write-megabytes-a-second": plain.nbytes / packing / 1e6,
            "read-megabytes-a-second": plain.nbytes / reading / 1e6,
        }
    found["levels"] = {str(levels): _bytes_of(levels) for levels in (4, 16, 64, 200)}
    found["growth"] = _growth(repeats)
    return found


def _both_ways(
    knowledge: Knowledge, small: Knowledge, encoding: str, size: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    return (
        lambda: as_offered(knowledge, {ENCODINGS: encoding}),
        lambda: as_meant(small, size, half=False),
    )


def _bytes_of(num_levels: int) -> dict[str, float]:
    """Return what few-bit scores take, packed and compressed."""
    packed = codes_of(SHAPE[0], num_levels)
    small = as_offered(Knowledge("", {SCORES: packed}), {ENCODINGS: wire.readable()[0]})
    sent, exact = small.arrays[SCORES].nbytes, 8 * SHAPE[0] * SHAPE[1]
    return {"packed": packed.nbytes, "sent": sent, "times-smaller-than-float64": exact / sent}


def _growth(repeats: int) -> dict[str, list[float]]:
    parts = []
    for rows in SIZES:
        knowledge = Knowledge("", {SCORES: codes_of(rows)})
        small = as_offered(knowledge, {ENCODINGS: wire.readable()[0]})
        size = knowledge.arrays[SCORES].nbytes
        parts += _both_ways(knowledge, small, wire.readable()[0], size)
    found = seconds(repeats, *parts)
    return {
        "rows": list(map(float, SIZES)),
        "write-seconds": found[::2],
        "read-seconds": found[1::2],
    }


# Labels and few-bit scores.


def packed_by_bits(labels: Array, width: int) -> Array:
    """Pack as one would write it first: every bit by itself."""
    shifts = np.arange(width - 1, -1, -1, dtype=np.uint32)
    return np.packbits(((labels.astype(np.uint32)[:, None] >> shifts) & 1).astype(np.uint8))


def labels(repeats: int) -> dict[str, Any]:
    found = {}
    for classes, width in ((2, 1), (10, 4), (100, 7)):
        drawn = np.random.default_rng(0).integers(0, classes, 500_000).astype(np.uint8)
        packed = pack_labels(drawn, classes)
        found[str(classes)] = _packing(repeats, drawn, packed, classes, width)
    return found


def _packing(
    repeats: int, drawn: Array, packed: Array, classes: int, width: int
) -> dict[str, Any]:
    own, reading, plain = seconds(
        repeats,
        lambda: pack_labels(drawn, classes),
        lambda: unpack_labels(packed, drawn.shape, classes),
        lambda: packed_by_bits(drawn, width),
    )
    return {
        "same": np.array_equal(packed, packed_by_bits(drawn, width)),
        "bits-a-label": 8 * packed.nbytes / len(drawn),
        "seconds": own,
        "reading-seconds": reading,
        "bit-by-bit-seconds": plain,
        "times-faster-than-bit-by-bit": plain / own,
    }


# Replies of real parties.


class ListeningGrid(InMemoryGrid):
    """A grid that keeps what parties answer when they are asked to train."""

    heard: list[Message]

    def pull_messages(self, message_ids: Any) -> list[Message]:
        """Return the replies that are there."""
        replies = super().pull_messages(message_ids)
        kept = getattr(self, "heard", [])
        self.heard = kept + [r for r in replies if r.metadata.message_type == "train"]
        return replies


def replies_of(settings: Mapping[str, Value]) -> tuple[list[Message], tuple[int, int]]:
    """Return what the parties of a small federation send, and their public rows' shape."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    chosen = Settings.from_run_config({**SAME, **settings})
    federation = load_federation(chosen)
    app = client_app(lambda context: federation.party(int(context.node_config["partition-id"])))
    grid = ListeningGrid(app, chosen.num_parties)
    federation.strategy().start(grid, ArrayRecord(), num_rounds=1)
    shape = len(federation.dataset.x_public), federation.dataset.num_classes
    return grid.heard, shape


def fedkd_reply(data: str) -> dict[str, Any]:
    """Return how large FedKD's default reply is, the first of a run."""
    replies, shape = replies_of({"strategy": "fedkd", "data": data, **FEDKD[data]})
    content = replies[0].content
    meta, arrays = content.config_records[keys.META], content.array_records[keys.ARRAYS]
    exact, sent = 8 * shape[0] * shape[1], arrays[SCORES].data
    return {
        "rows": shape[0],
        "classes": shape[1],
        "encoding": str(meta.get(ENCODING, "none")),
        "float64-bytes": exact,
        "scores-bytes": len(sent),
        "message-bytes": count_bytes(content),
        "times-smaller-than-float64": exact / len(sent),
        "message-times-smaller-than-float64": exact / count_bytes(content),
    }


def upload(name: str) -> dict[str, Any]:
    """Return the default one-shot upload (FedKT) beside the models that it stands for."""
    own = {"strategy": "fedkt", **FEDKT[name], "final-learner": FEDKT[name]["learner"]}
    votes, shape = replies_of(own)
    models, _ = replies_of({**own, "exchange": "models"})
    packed = votes[0].content.array_records[keys.ARRAYS]["votes"]
    said, model = count_bytes(votes[0].content), count_bytes(models[0].content)
    return {
        "rows": shape[0],
        "classes": shape[1],
        "votes-bytes": decode_array("votes", packed).nbytes,
        "votes-message-bytes": said,
        "model-message-bytes": model,
        "times-smaller": model / decode_array("votes", packed).nbytes,
        "message-times-smaller": model / said,
    }


def half_precision() -> dict[str, Any]:
    """Return the upload of FedAvg's network on MNIST as it is, and with float16."""
    own: dict[str, Value] = {"strategy": "fedavg", "data": "mnist", "train-rows": 600}
    own |= {"learner": "mlp", "final-learner": "mlp", "public-rows": 200}
    plain, half = (
        count_bytes(replies_of({**own, "half-precision": on})[0][0].content)
        for on in (False, True)
    )
    return {"float32-bytes": plain, "float16-bytes": half, "times-smaller": plain / half}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(measure(parser.parse_args().repeats), indent=1))


if __name__ == "__main__":
    main()
