"""Memory of FedMD's server for one round, with 100 and with 1,000 parties.

Run: ``python benchmarks/consensus.py``. Each reply is a real Flower message with 5000 rows of
100 scores in float32 (2 MB), made when it is asked for and encoded as for the wire, so only
what the strategy keeps adds up. The peak must not grow with the number of parties.
"""

import resource
import time
import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.tabular.kernel import RidgeLearner
from fl_strategies import Knowledge, _compat
from fl_strategies._util import Array
from fl_strategies.aggregation.consensus import ConsensusRule
from fl_strategies.strategies.fedmd import FedMD
from fl_strategies.wire import keys
from simulations.runtime.local import InMemoryGrid

NUM_PUBLIC, NUM_CLASSES = 5000, 100


def replies(requests: Sequence[Message], pool: Array, weighted: bool) -> Iterator[Message]:
    """Yield one synthetic answer after the other, each gone before the next is made."""
    for number, message in enumerate(requests):
        content = RecordDict()
        arrays: dict[str, Array] = {"scores": np.roll(pool, number, axis=1)}
        if weighted:
            arrays["class-counts"] = np.full(NUM_CLASSES, number)
        Knowledge("answers", arrays, {keys.PARTITION_ID: number}).write(content)
        content[keys.METRICS] = MetricRecord({keys.NUM_EXAMPLES: 100})
        encoded = _compat.message_to_bytes(Message(content, reply_to=message))
        yield _compat.message_from_bytes(encoded)


def measure(rule: ConsensusRule, num_parties: int) -> tuple[float, float]:
    """Return the peak of memory in MB and the seconds of one round."""
    public = np.zeros((NUM_PUBLIC, 2))
    powers = np.random.default_rng(0).gamma(1.0, size=(NUM_PUBLIC, NUM_CLASSES))
    pool = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
    start = time.process_time()
    tracemalloc.start()
    strategy = FedMD.from_settings(
        public=public,
        num_classes=NUM_CLASSES,
        learner_fn=lambda: RidgeLearner(num_classes=NUM_CLASSES),
        payload="softmax",
        consensus=rule,
        num_parties=num_parties,
        evaluate=False,
    )
    grid = InMemoryGrid(ClientApp(), num_parties)
    requests = strategy.ask_parties(1, ArrayRecord(), ConfigRecord(), grid)
    for message in requests:
        _compat.assign_message_id(message)
    weighted = rule == "class-weighted"
    _, metrics = strategy.aggregate_train(1, replies(requests, pool, weighted))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if metrics is None or metrics[keys.NUM_PARTIES] != num_parties:
        raise RuntimeError(f"replies were refused: {strategy.rejected_}")
    return peak / 2**20, time.process_time() - start


def main() -> None:
    rules: list[ConsensusRule] = ["mean", "class-weighted"]
    for rule in rules:
        for num_parties in (100, 1000):
            peak, seconds = measure(rule, num_parties)
            print(
                f"{rule}, {num_parties} replies of 2 MB: peak {peak:.0f} MB, "
                f"{seconds:.1f} s of processor time"
            )
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"largest size of the whole process: {process:.0f} MB")


if __name__ == "__main__":
    main()
