"""FedDF: the server distils the ensemble of uploaded models into their averages.

    round r   server   sends each party the present model of its kind
              party    trains it on its own records and sends it, as in FedAvg
              server   averages the models of each kind, and lets each average learn what
                       all models together say about unlabelled public rows

Parties do nothing that FedAvg does not ask of them, and need no public rows. They may even run
Flower's own client code, which reads `arrays` and `config` of a message, and answers with one
`ArrayRecord` and one `MetricRecord` of any names. Such an answer says neither which party it is
from nor what it cost a record: the server numbers the party, and its weights count as sent
without noise.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar, Final, Literal, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fl_strategies.aggregation.ensembles import describe, rebuild
from fl_strategies.aggregation.evidence import capped_scales, root_mean_square
from fl_strategies.extend import (
    DEFAULT_DELTA,
    Array,
    FederationOptions,
    FloatArray,
    FlowerStrategy,
    Knowledge,
    KnowledgeMismatch,
    Learner,
    LearnerFactory,
    LocalWeights,
    Metrics,
    Party,
    PartyReply,
    PartyState,
    Recipe,
    Scalar,
    StartingLearner,
    Task,
    WeightsOptions,
    WeightsParty,
    WeightsState,
    check_factories,
    check_public_data,
    content_hash,
    derive_rng,
    keys,
    link_scores,
    open_charges,
    option,
    public_array,
    require,
    require_finite,
    require_known,
)
from fl_strategies.learners import Link
from fl_strategies.party.role import ledger_of, ledger_to_text, privacy_metrics, unprotected
from fl_strategies.server.replies import EVALUATION, Known
from fl_strategies.server.strategy import logger
from fl_strategies.strategies.codistill.options import MODELS, join_models, part_models
from fl_strategies.strategies.weights.options import MODEL, UNPROTECTED_WEIGHTS, WEIGHTS
from fl_strategies.strategies.weights.party import require_starting
from fl_strategies.strategies.weights.restraint import (
    FEWEST_RESTRAINED,
    layout_of,
    read_weights,
)

SERVER_PUBLIC: Final = "server-public-hash"
"""Fingerprint of the server's public rows, for parties that hold some, too."""
_ROWS_TO_TRY: Final = 32
_LEDGER: Final = ledger_of(open_charges(UNPROTECTED_WEIGHTS), DEFAULT_DELTA)


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
        """Return the paper's loss: the divergence from the ensemble's answers."""
        if task == "regression":
            return Recipe(epochs=self.distill_epochs)
        link: Link = "sigmoid" if task == "multi-label" else "softmax"
        return Recipe(
            loss="cross-entropy",
            link=link,
            temperature=self.temperature,
            epochs=self.distill_epochs,
        )


def read_plain(
    replies: Iterable[Message], sent: Sequence[Message], members: Known, learner: str
) -> Iterator[Message]:
    """Yield replies, plain ones as our own parties would have written them.

    New nodes get the numbers that nobody has, by node id; a plain party has the kind of model
    that `learner` names.
    """
    nodes = {m.metadata.message_id: m.metadata.dst_node_id for m in sent}
    taken = {number for claim in members.values() for number in claim}
    free = (number for number in count() if number not in taken)
    numbers = {n: members[n][0] if n in members else next(free) for n in sorted(nodes.values())}
    for reply in replies:
        node = nodes.get(reply.metadata.reply_to_message_id)
        if node is not None and reply.has_content() and keys.META not in reply.content:
            meta: dict[str, Scalar] = {keys.PARTITION_ID: numbers[node], keys.LEARNER: learner}
            reply.content = _as_ours(reply.content, meta)
        yield reply


def _as_ours(content: RecordDict, meta: dict[str, Scalar]) -> RecordDict:
    """Return the records of a plain answer under our names; what is missing stays missing."""
    arrays = next(iter(content.array_records.values()), None)
    metrics = next(iter(content.metric_records.values()), None)
    if metrics is None:
        return content
    if arrays is None:
        return _records(ArrayRecord(), {**meta, keys.KIND: EVALUATION}, metrics)
    num_examples = metrics.get(keys.NUM_EXAMPLES)
    if isinstance(num_examples, int | float):
        meta = {**meta, keys.NUM_EXAMPLES: num_examples}
    meta = {**meta, keys.KIND: WEIGHTS, keys.PRIVACY_EVENTS: ledger_to_text(_LEDGER)}
    cost = privacy_metrics(party=unprotected(UNPROTECTED_WEIGHTS), example=_LEDGER)
    return _records(arrays, meta, MetricRecord({**metrics, **cost}))


def _records(arrays: ArrayRecord, meta: dict[str, Scalar], metrics: MetricRecord) -> RecordDict:
    own = ConfigRecord({**meta})
    return RecordDict({keys.ARRAYS: arrays, keys.META: own, keys.METRICS: metrics})


class FedDFParty(WeightsParty):
    """The party's role: train the model of its own kind on the own records, and send it."""

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Return the weights after training, and how many records they have seen."""
        if SERVER_PUBLIC in config and len(party.public):
            # No party needs public rows; other ones mostly mean other preprocessing.
            asked = {**config, keys.PUBLIC_HASH: config[SERVER_PUBLIC]}
            check_public_data(party, ConfigRecord(asked))
        if received is not None and received.kind == MODELS:
            # The models of all kinds.
            found = {str(m.meta.get(keys.LEARNER)): m for m in part_models(received)}
            name, rule = party.learner_name, f"one the server has ({', '.join(found)[:200]})"
            require_known(name in found, party.owner, "learner_name", rule, repr(name))
            received = found[name]
        return super().train(party, received, config, state)


@dataclass(kw_only=True)
class FedDFState(WeightsState):
    """Also the models of the other kinds, and which kind each node has."""

    models: dict[str, Knowledge] = field(default_factory=dict)
    learners: dict[int, str] = field(default_factory=dict)


class FedDF(FlowerStrategy):
    """Ensemble distillation at the server, for one kind of model or several.

    Lin, Kong, Stich, Jaggi: Ensemble Distillation for Robust Model Fusion in Federated
    Learning (NeurIPS 2020), Algorithms 1 and 3. Each round begins as FedAvg's does, with one
    average for each kind of model; then every average learns, by gradient steps on public
    rows without labels, the mean of what all models of the round say about them.

    Leaves the party
        In every round the weights of its model after training, and its number of records.
    Guarantee
        That of `FedAvg`: none, unless every party trains with differential privacy. What
        the server does with the weights costs nothing more.

    Parameters
    ----------
    public : (num_public, ...)
        Unlabelled rows. Only the server needs them; a party that holds other public rows is
        excluded, since that mostly means other preprocessing.
    num_classes, task
        See `FlowerStrategy`.
    learner_fn, learner_name : factory, str
        The kind of the final model, which parties may have or not. How it learns on the
        server, such as its step size, is the learner's own setting.
    model_fns : mapping of learner name to factory, optional
        The other kinds of models that parties have.
    options : FedDFOptions, optional
    **federation
        See `KnowledgeStrategy`.

    Notes
    -----
    With one kind of model this is a drop-in for FedAvg: parties may run Flower's plain client
    code, which answers `arrays` with an `ArrayRecord` and a metric ``num-examples``. Such a
    party has the server's kind of model, and its weights count as sent without noise. With
    several kinds parties need `clients.client_app`, since a node whose kind is not known yet
    is sent the models of all.

    Deviations: the distillation takes passes over the rows, not 10,000 steps that end early
    by labelled validation rows, of which there are none. Unless `restrain` is off, weights
    are limited within each kind as in `FedAvg`, and no model is louder in the ensemble than
    twice the median one.
    """

    name: ClassVar[str] = "feddf"
    options_type = FedDFOptions
    takes = (
        "public",
        "num_classes",
        "learner_fn",
        "learner_name",
        "model_fns",
        "task",
        "options",
    )
    identified_by = (*FlowerStrategy.identified_by, "public", "model_fns")
    state_type = FedDFState
    same_learner: ClassVar[bool] = False
    needs_public: ClassVar[bool] = True
    party_learner_needs: ClassVar[tuple[type, ...]] = (StartingLearner,)
    final_learner_needs: ClassVar[tuple[type, ...]] = (StartingLearner,)
    options: FedDFOptions
    state: FedDFState

    def __init__(
        self,
        *,
        public: Array,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        model_fns: Mapping[str, LearnerFactory] | None = None,
        task: Task = "single-label",
        options: FedDFOptions | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            learner_fn=learner_fn,
            learner_name=learner_name,
            task=task,
            public=public,
            options=options,
            **federation,
        )
        self.public = public_array("FedDF", public)
        require(len(self.public) > 0, "FedDF", "public", "at least one row", len(self.public))
        check_factories("FedDF", None, num_classes, model_fns=model_fns)
        self.model_fns = {**(model_fns or {}), learner_name: learner_fn}
        for factory in self.model_fns.values():
            self.require_learner(factory())

    def require_learner(self, learner: Learner) -> StartingLearner:
        """Return the learner if its first weights can be drawn."""
        return require_starting("FedDF", learner)

    def party_config(self) -> dict[str, Scalar]:
        """Return how to train; which model it is only where there is one kind."""
        config = {**super().party_config(), SERVER_PUBLIC: content_hash(self.public)}
        omitted = {keys.PUBLIC_HASH} | ({keys.LEARNER} if len(self.model_fns) > 1 else set())
        return {key: value for key, value in config.items() if key not in omitted}

    # What parties are sent.

    def lesson(self) -> Knowledge:
        """Return the models of all kinds, for nodes whose kind is unknown."""
        for name, factory in self.model_fns.items():
            if name != self.model_name and name not in self.state.models:
                rng = derive_rng(self.seed, "weights", "initial")
                drawn = self.require_learner(factory()).initialised(rng=rng)
                self.state.models[name] = _model(name, drawn)
        return join_models(list(self._models.values()))

    @property
    def _models(self) -> dict[str, Knowledge]:
        """The present model of each kind, the final one first."""
        final = self.state.delivery
        own = {} if final is None else {self.model_name: final}
        return {**own, **self.state.models}

    def knowledge_for(self, node_id: int) -> Knowledge | None:
        """Return the model of this node's kind; those of all kinds if it is not known."""
        own = self.delivery_for(node_id)
        return super().knowledge_for(node_id) if own is None else own

    def delivery_for(self, node_id: int) -> Knowledge | None:
        """Return the model of this node's kind, if it is known."""
        models = self._models
        only = self.model_name if len(models) == 1 else ""
        return models.get(self.state.learners.get(node_id, only))

    @property
    def delivered_learner(self) -> str:
        """The one kind there is; of several, each party is given its own."""
        return super().delivered_learner if len(self.model_fns) == 1 else ""

    # What they answer.

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the valid replies, also those of plain parties."""
        return super().aggregate_train(server_round, self._read(replies))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Combine what parties measured, also plain ones."""
        return super().aggregate_evaluate(server_round, self._read(replies))

    def _read(self, replies: Iterable[Message]) -> Iterable[Message]:
        return read_plain(replies, self._sent, self.members, self.model_name)

    def check(self, knowledge: Knowledge) -> LocalWeights:
        """Check one party's weights by a learner of its kind, which must score some rows."""
        weights = read_weights(knowledge)
        model = self._twin(str(knowledge.meta.get(keys.LEARNER)), weights.arrays)
        _scores(model, self.public[:_ROWS_TO_TRY])
        return weights

    def _twin(self, name: str, arrays: Mapping[str, Array]) -> StartingLearner:
        return self.require_learner(
            rebuild("FedDF", name, arrays, self.model_fns, self.num_classes)
        )

    def exclude(self, replies: Sequence[PartyReply[LocalWeights]]) -> Mapping[int, str]:
        """Return nodes whose weights have not the layout of their kind."""
        usual = {name: layout_of(model.arrays) for name, model in self._models.items()}
        return {
            reply.node_id: "Reply: weights must have the model's layout, got another."
            for reply in replies
            if layout_of(reply.knowledge.arrays) != usual.get(reply.learner_name)
        }

    # What becomes of it.

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Average each kind, and distil what all models say into the averages."""
        kinds: dict[str, list[PartyReply[LocalWeights]]] = {}
        for reply in self.replies:
            kinds.setdefault(reply.learner_name, []).append(reply)
            self.state.learners[reply.node_id] = reply.learner_name
        means = {name: model.arrays for name, model in self._models.items()}
        members: list[Learner] = []
        capped = 0
        try:
            for name, replies in kinds.items():
                weights, changed = self._restrained([reply.knowledge for reply in replies])
                nodes = [reply.node_id for reply in replies]
                means[name] = self._aggregate(nodes, weights, means[name])
                members += [self._twin(name, part.arrays) for part in weights]
                capped += changed
            targets, quieter = self._targets(members)
            students = {name: self._taught(name, means[name], targets) for name in means}
        except Exception as error:  # untrusted weights may make a learner raise anything
            self.fail(f"the ensemble made no model: {error}")
            return None, {keys.NUM_CAPPED: capped}
        for name in self.state.models:
            self.state.models[name] = _model(name, students[name])
        final = self.keep_model(students[self.model_name])
        return final, {keys.NUM_CAPPED: capped + quieter}

    def _targets(self, members: Sequence[Learner]) -> tuple[FloatArray, int]:
        """Return the ensemble's answers on public rows, and how many were scaled down."""
        recipe = self.options.recipe(self.task)
        scores = self._all_scores(members)
        if self.task == "single-label":  # the softmax does not see this shift
            scores = [each - each.mean(axis=1, keepdims=True) for each in scores]
        weights = np.ones(len(scores))
        compared = self.options.restrain and self.task != "regression"
        if compared and len(scores) >= FEWEST_RESTRAINED:
            scales = np.array([max(root_mean_square(each), 1e-12) for each in scores])
            weights = capped_scales(scales) / scales
        scores = [part * each for part, each in zip(weights, scores, strict=True)]
        quieter = int((weights < 1).sum()) + len(members) - len(scores)
        if self.options.ensemble == "probabilities":
            linked = [link_scores(each, recipe) for each in scores]
            return np.asarray(sum(linked) / len(linked)), quieter
        return link_scores(np.asarray(sum(scores) / len(scores)), recipe), quieter

    def _all_scores(self, members: Sequence[Learner]) -> list[FloatArray]:
        """Return the models' scores of public rows; a model that fails on some is left out."""
        scores = []
        for member in members:
            try:
                scores.append(_scores(member, self.public))
            except Exception as error:  # untrusted weights may make a learner raise anything
                logger.warning("FedDF omits a model from the ensemble: %s", describe(error))
        require_known(bool(scores), "FedDF", "a model", "able to score the public rows", "none")
        return scores

    def _taught(
        self, name: str, arrays: Mapping[str, Array], targets: FloatArray
    ) -> StartingLearner:
        """Return the average of a kind after the distillation."""
        rng, recipe = derive_rng(self.seed, "feddf", name, self.round_), self.options.recipe
        student = self._twin(name, arrays).distill(
            self.public, targets, rng=rng, recipe=recipe(self.task)
        )
        require_finite(student)
        return student


def _model(name: str, learner: StartingLearner) -> Knowledge:
    return Knowledge(MODEL, learner.to_arrays(), {keys.LEARNER: name})


def _scores(model: Learner, x: Array) -> FloatArray:
    """Return a model's logits; raise `KnowledgeMismatch` unless there is one for each class."""
    with np.errstate(over="ignore", invalid="ignore"):
        scores = np.asarray(model.logits(x), dtype=np.float64)
    if scores.shape != (len(x), model.num_classes) or not np.isfinite(scores).all():
        raise KnowledgeMismatch(
            f"Reply: a model must give {model.num_classes} finite logits a row, got others."
        )
    return scores
