"""What can be set about co-distillation."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fl_strategies.options import Options, option

CodistillLoss: TypeAlias = Literal["mse", "cross-entropy"]


@dataclass(frozen=True, kw_only=True)
class CodistillOptions(Options):
    """Options of AKD, AvgKD, PKD and EKD.

    Parameters
    ----------
    target_loss : "mse" or "cross-entropy"
        How agents learn probabilities, "mse" in the paper's figures; regression has "mse".
    """

    target_loss: CodistillLoss = option("mse", "how agents learn probabilities")
