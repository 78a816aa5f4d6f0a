"""Budget of memory and work for rebuilding received models, shared by every learner.

A model may take a multiple of the bytes that arrived, and never more than the largest
message that is read; a row may pass so many splits of its trees. Learners whose arrays have
the shapes of the receiver's own settings stay far below.

`tests/attacks/test_received_models.py` tries to make 1 MB take more than 64 MiB of memory, or
endless time. On a quiet machine each attack takes less than a second of processor time to be
rebuilt and to score 50 rows. Time also grows with what the receiver chose itself: the rows that
it scores and, in a `MultiLabelLearner`, its labels (350: 1.7 s).
"""

from collections.abc import Mapping
from typing import Final

from fl_strategies._util import Array, IntArray
from fl_strategies.errors import require_known
from fl_strategies.wire.knowledge import MAX_REPLY_BYTES

GROWTH: Final = 24
"""Bytes of memory for each byte that arrived; the smallest node of a tree grows 16 times."""
SPARE: Final = 2**16
"""Bytes that a model may take however few arrived."""
# No table is wider; a receiver may then allocate a row of any declared width.
MAX_WIDTH: Final = 2**20
MAX_TREES: Final = 10_000
# A tree on honest data has some tens of levels. Native code may walk one by recursion, and
# numpy takes a step of Python for each.
MAX_LEVELS: Final = 256
MAX_STEPS: Final = 2**15
LEVELS_PER_TREE: Final = 64


def require_memory(
    owner: str, arrays: Mapping[str, Array], num_bytes: int, most: int = MAX_REPLY_BYTES
) -> None:
    """Raise `KnowledgeMismatch` if a model of these arrays would take too many bytes."""
    arrived = sum(getattr(array, "nbytes", 0) for array in arrays.values())
    limit = min(most, SPARE + GROWTH * arrived)
    rule = f"those of a model up to {limit} bytes in memory"
    require_known(num_bytes <= limit, owner, "arrays", rule, num_bytes)


def require_steps(owner: str, levels: IntArray) -> None:
    """Raise `KnowledgeMismatch` if a row would pass too many of the levels of each tree."""
    deepest, steps = int(levels.max()), int(levels.sum())
    rule = f"of at most {MAX_LEVELS} levels"
    require_known(deepest <= MAX_LEVELS, owner, "trees", rule, "more")
    limit = max(MAX_STEPS, LEVELS_PER_TREE * len(levels))
    require_known(steps <= limit, owner, "trees", f"of at most {limit} levels in all", steps)
