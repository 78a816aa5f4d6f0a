"""FedKD: one-shot distillation of quantized, class-weighted, noisy logits.

Gong, Sharma, Karanam, Wu, Chen, Doermann, Innanje: Preserving Privacy in Federated Learning
with Ensemble Cross-Domain Knowledge Distillation (AAAI 2022), Algorithm 1.

    party    a model trained on its records to the end
             its logits on the public rows, rounded to S levels, ceil(log2 S) bits each
    server   per class the mean over parties, weighted by their records of that class (Eq. 1)
             plus noise, drawn once (Eq. 2)
             the final model, distilled from these scores on the public rows (Eq. 7)
"""

from fl_strategies.strategies.fedkd.options import FedKDOptions
from fl_strategies.strategies.fedkd.party import FedKDParty
from fl_strategies.strategies.fedkd.server import FedKD

__all__ = ["FedKD", "FedKDOptions", "FedKDParty"]
