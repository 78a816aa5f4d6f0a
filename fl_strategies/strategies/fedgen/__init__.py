"""FedGen: FedAvg with a generator of features, and no public rows.

    round r   server   sends the model, from round 2 on with the generator
              party    trains it on its records and on generated features
                       sends it and its class counts
              server   averages the models; trains the generator by their last layers

The generator's arithmetic is in `generator`.
"""

from fl_strategies.strategies.fedgen.options import FedGenOptions
from fl_strategies.strategies.fedgen.party import FedGenParty
from fl_strategies.strategies.fedgen.server import FedGen

__all__ = ["FedGen", "FedGenOptions", "FedGenParty"]
