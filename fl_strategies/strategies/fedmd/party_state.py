"""What a party of FedMD keeps: its model, its sample, what it has digested."""

from fl_strategies.arrays import IntArray
from fl_strategies.core.party_state import ArrayField, ArraysField, PartyState, ScalarField
from fl_strategies.core.protocols import Learner, LearnerFactory, PortableLearner
from fl_strategies.wire.packing import pack_labels, unpack_labels

_NOTES = "fedmd"


class FedMDPartyState(PartyState):
    """State of a party of FedMD."""

    terms = ScalarField(_NOTES, "terms", "")
    """Terms of the last training that was paid for; empty before the first."""
    digested_round = ScalarField(_NOTES, "digested-round", 0)
    """Round of the consensus that was digested last; 0 before the first."""
    model_arrays = ArraysField("fedmd-model")
    """The model, for learners that continue."""
    model_origin = ScalarField(_NOTES, "model-origin", "")
    """What the model was trained on, and for whom."""
    packed_consensus = ArrayField("fedmd-consensus", "labels")
    """Labels of the last consensus, for learners that start anew each time."""
    found_contrast = ScalarField(_NOTES, "contrast", "")
    """How records relate to public rows, and which records."""
    sample = ArrayField("fedmd-sample", "rows")
    """Positions of the records in use, with noise-free privacy."""
    sample_origin = ScalarField(_NOTES, "sample", "")
    """How the sample was drawn."""
    sample_id = ScalarField(_NOTES, "sample-id", "")
    """A random name of the sample, which says nothing about it; empty without one."""

    def start_anew(self) -> None:
        """Forget model, consensus and terms; the sample and what was spent stay."""
        self.model_arrays = self.packed_consensus = None
        self.digested_round, self.terms, self.found_contrast = 0, "", ""

    def contrast(self, terms: str) -> str:
        """Return how the records of these terms relate to public rows; empty if unknown."""
        contrast, _, origin = self.found_contrast.partition("; ")
        return contrast if origin == self._origin(terms) else ""

    def keep_contrast(self, contrast: str, terms: str) -> None:
        """Keep how the records of these terms relate to public rows."""
        self.found_contrast = f"{contrast}; {self._origin(terms)}"

    def model(self, learner_fn: LearnerFactory, terms: str) -> Learner | None:
        """Return the model as it was kept, if there is one of these very terms.

        What has been paid for records under one release does not pay for another: a model
        that has seen all of them may answer with noise, but not in place of a sample's.
        """
        if self.model_origin != self._origin(terms):
            return None
        arrays, twin = self.model_arrays, learner_fn()
        if arrays is None or not isinstance(twin, PortableLearner):
            return None
        return twin.from_arrays(arrays)

    def keep_model(self, model: PortableLearner, *, digested_round: int, terms: str) -> None:
        """Keep a model together with what it has digested, and what it was trained on."""
        self.model_arrays = model.to_arrays()
        self.digested_round, self.model_origin = digested_round, self._origin(terms)

    def consensus_labels(self, num_public: int, num_classes: int) -> IntArray | None:
        """Return the labels of the last consensus, if one is kept."""
        packed = self.packed_consensus
        return None if packed is None else unpack_labels(packed, (num_public,), num_classes)

    def keep_consensus(
        self, labels: IntArray, num_classes: int, *, digested_round: int
    ) -> None:
        """Keep the labels of a consensus and its round."""
        self.packed_consensus = pack_labels(labels, num_classes)
        self.digested_round = digested_round

    def _origin(self, terms: str) -> str:
        return f"{terms}; sample {self.sample_id}"
