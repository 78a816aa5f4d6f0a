"""What can be set about FedDF."""

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from fl_strategies.core.protocols import Link, Recipe
from fl_strategies.core.tasks import Task
from fl_strategies.options import option
from fl_strategies.strategies.weights.options import WeightsOptions

SERVER_PUBLIC: Final = "server-public-hash"
"""What identifies the server's public rows, for parties that happen to hold some."""


@dataclass(frozen=True, kw_only=True)
class FedDFOptions(WeightsOptions):
    """Options of `FedDF`; the others are those of `WeightsOptions`.

    Parameters
    ----------
    ensemble : "logits" or "probabilities"
        What is averaged over the models: logits, as in the paper, or what they say after
        the softmax, where one model counts for one however sure it is.
    temperature : float
        Logits of both sides are divided by it; the paper's is 1.
    distill_epochs : int, optional
        Passes over the public rows in a round; the learner's own number if omitted.
    """

    owner: ClassVar[str] = "FedDF"

    ensemble: Literal["logits", "probabilities"] = option(
        "logits", "what is averaged over the models"
    )
    temperature: float = option(1.0, "of the distillation", above=0, most=1000)
    distill_epochs: int | None = option(None, "passes of distillation; 0: the model's", least=1)

    def recipe(self, task: Task) -> Recipe:
        """Return the paper's loss: the divergence from what the ensemble says."""
        if task == "regression":
            return Recipe(epochs=self.distill_epochs)
        link: Link = "sigmoid" if task == "multi-label" else "softmax"
        return Recipe(
            loss="cross-entropy",
            link=link,
            temperature=self.temperature,
            epochs=self.distill_epochs,
        )
