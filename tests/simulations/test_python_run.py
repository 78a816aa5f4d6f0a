"""A federation written in Python leaves the folder that a command would."""

import json
from pathlib import Path

import numpy as np
from flwr.app import Context
from sklearn.tree import DecisionTreeClassifier

from clients import ModelCard, SklearnLearner, client_app, load_model
from fl_strategies import FedKD, Party
from simulations.results.run_folder import write_run
from simulations.runtime.local import run_local


def tree() -> SklearnLearner:
    return SklearnLearner(DecisionTreeClassifier(random_state=0), num_classes=2)


def test_the_folder_has_a_report_and_a_model_to_load(tmp_path: Path) -> None:
    """The page says what was measured, and the model predicts as before."""
    x = np.random.default_rng(0).normal(size=(60, 3))
    y = (x[:, 0] > 0).astype(int)

    def load_party(context: Context) -> Party:
        number = int(context.node_config["partition-id"])
        mine = slice(number, 40, 2)
        return Party(
            x=x[mine],
            y=y[mine],
            public=x[40:],
            num_classes=2,
            learner_fn=tree,
            learner_name="my-tree",
            partition_id=number,
        )

    strategy = FedKD(
        public=x[40:], num_classes=2, learner_fn=tree, learner_name="my-tree", num_parties=2
    )
    result = run_local(strategy, client_app(load_party), num_nodes=2)
    card = ModelCard(learner="tree", row_shape=(3,), classes=("no", "yes"))
    page = write_run(strategy, result, tmp_path / "run", card=card, accuracy=0.915)

    assert page == tmp_path / "run" / "report.html"
    text = page.read_text(encoding="utf-8")
    assert "Accuracy 91.5 %, compared with nothing." in text
    assert "my-tree" in text
    assert json.loads((page.parent / "result.json").read_text())["accuracy"] == 0.915
    assert "Guarantee: none" in (page.parent / "privacy.txt").read_text()
    assert (page.parent / "epsilon.csv").is_file()
    model = load_model(page.parent, tree)
    assert model.logits(x).tolist() == strategy.model_.logits(x).tolist()


def test_without_a_card_there_is_no_model(tmp_path: Path) -> None:
    """And an untested model is called so."""
    x = np.eye(4)

    def load_party(context: Context) -> Party:  # noqa: ARG001
        return Party(
            x=x,
            y=np.array([0, 1, 0, 1]),
            public=x,
            num_classes=2,
            learner_fn=tree,
            partition_id=0,
        )

    strategy = FedKD(public=x, num_classes=2, learner_fn=tree, num_parties=1)
    page = write_run(strategy, run_local(strategy, client_app(load_party), 1), tmp_path)

    assert not (tmp_path / "model").exists()
    assert "Not tested and compared with nothing." in page.read_text(encoding="utf-8")
