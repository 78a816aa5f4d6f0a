"""FedKT: federated learning via knowledge transfer, in one round.

Li, He, Song: Practical One-Shot Federated Learning for Cross-Silo Setting (IJCAI 2021),
Algorithm 1.

    party    s random partitions of its records, each into t disjoint subsets
             a teacher per subset; the t teachers of a partition vote on the public rows
             a student per partition, trained on the public rows with these labels
    server   a party whose s students agree on a row gives s votes, otherwise none
             the final model is trained on the public rows with the winning labels

Beyond the paper, which is ``num_splits=2, num_teachers=5, corrected=False,
vote_weights="none"``: parties train whole-party models unless noise needs teachers, teachers
vote without their own class shares, and at L0 the server weighs the votes by the parties'
class counts and gives the classes their pooled shares (`aggregation.evidence`).

At level L1 the server puts noise on the parties' votes, at L2 each party on its teachers'.
"""

from fl_strategies.strategies.fedkt.options import FedKTOptions
from fl_strategies.strategies.fedkt.party import FedKTParty
from fl_strategies.strategies.fedkt.server import FedKT

__all__ = ["FedKT", "FedKTOptions", "FedKTParty"]
