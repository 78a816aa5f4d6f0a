"""FedDF: the server distils the ensemble of uploaded models into their averages.

    round r   server   sends each party the present model of its kind
              party    trains it on its own records and sends it, as in FedAvg
              server   averages the models of each kind, and lets each average learn what
                       all models together say about unlabelled public rows

Parties do nothing that FedAvg does not ask of them, and need no public rows.
"""

from fl_strategies.strategies.feddf.options import FedDFOptions
from fl_strategies.strategies.feddf.party import FedDFParty
from fl_strategies.strategies.feddf.server import FedDF

__all__ = ["FedDF", "FedDFOptions", "FedDFParty"]
