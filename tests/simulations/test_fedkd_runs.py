"""FedKD from settings to report, at toy size: labels, texts, other domains, no torch."""

import csv
import io
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulations.config import Settings
from simulations.federation import load_federation
from simulations.models import LEARNERS
from simulations.results.report import make_report
from simulations.runtime.client_app import app
from simulations.runtime.local import run_local

COMMON = {
    "strategy": "fedkd",
    "data": "breast-cancer",
    "num-parties": 3,
    "num-trees": 20,
    "boosting-rounds": 20,
    "beta": 5.0,
    "solo": False,
    "pooled": False,
}
IMAGE_NETWORKS = ("mnist-net", "convolutional", "vgg9", "resnet8", "resnet34")
WORDS = ("minister treaty embassy", "goal coach stadium", "shares bank profit", "chip code lab")


def run(**settings: Any) -> dict[str, Any]:
    given = {**COMMON, **{key.replace("_", "-"): value for key, value in settings.items()}}
    chosen = Settings.from_run_config(given)
    federation = load_federation(chosen)
    strategy = federation.strategy()
    result = run_local(
        strategy,
        app,
        chosen.num_parties,
        num_rounds=chosen.num_rounds,
        run_config=chosen.to_run_config(),
    )
    return make_report(federation, strategy, result, seconds=1.0)


@pytest.fixture
def chest(tmp_path: Path) -> Path:
    """Write X-rays on which finding k is a bright band k; some labels are unknown."""
    rng = np.random.default_rng(0)
    y = (rng.random((300, 3)) < 0.4).astype(np.int8)
    x = rng.integers(0, 90, (300, 32, 32), dtype=np.uint8)
    for finding in range(3):
        x[y[:, finding] == 1, 10 * finding : 10 * finding + 8] += 120
    y[rng.random((300, 3)) < 0.1] = -1
    np.savez(
        tmp_path / "nih_cxr14_5k.npz",
        x=x,
        y=y,
        patient_id=np.arange(300) // 2,
        classes=np.array(["first", "second", "third"]),
    )
    return tmp_path


@pytest.mark.parametrize(
    ("learner", "final"),
    [
        ("convolutional", "convolutional"),
        ("logistic-regression,random-forest,forest-scores", "xgboost-scores"),
    ],
)
def test_several_labels(chest: Path, learner: str, final: str) -> None:
    """Findings are learned by networks, and without torch by trees on scores."""
    report = run(
        data="nih-cxr",
        data_dir=str(chest),
        learner=learner,
        final_learner=final,
        epochs=8,
        balanced=False,
        solo=True,
        pooled=True,
    )

    assert report["metric"] == "mean-auc"
    assert 0.75 < report["mean-auc"] <= 1
    assert report["solo-mean-auc"] > 0.5
    assert report["epsilon-example"] == float("inf")


FINAL = [name for name in LEARNERS if name not in (*IMAGE_NETWORKS, "embedding-bag")]


@pytest.mark.parametrize("final", FINAL)
def test_any_model_can_be_the_final_one(final: str) -> None:
    """It need not be of a kind that regresses on scores."""
    report = run(
        final_learner=final,
        learning_rate=0.01,
    )

    assert report["accuracy"] > 0.8


@pytest.mark.parametrize("final", ["random-forest", "xgboost", "logistic-regression"])
def test_models_of_one_label_are_taught_several(chest: Path, final: str) -> None:
    """Log-odds of findings are learned by one model each."""
    report = run(
        data="nih-cxr",
        data_dir=str(chest),
        learner="logistic-regression,random-forest",
        final_learner=final,
        balanced=False,
    )

    assert report["mean-auc"] > 0.75


@pytest.mark.parametrize("payload", ["logits", "softmax", "argmax"])
def test_the_consensus_of_fedmd_teaches_a_forest(payload: str) -> None:
    """The server's own model learns scores like any other, also noisy ones."""
    noise = {"release": "ldp", "noise": "gaussian", "sigma": 0.05}
    released = {
        "logits": {**noise, "clipping_norm": 5.0},
        "softmax": {**noise, "clipping_norm": 0.0},
        "argmax": {},
    }
    asked = {"payload": payload, **released[payload]}
    report = run(strategy="fedmd", num_server_rounds=2, learner="random-forest,mlp", **asked)

    assert report["accuracy"] > 0.8


@pytest.mark.parametrize("strategy", ["akd", "avgkd", "pkd"])
@pytest.mark.parametrize("learner", ["random-forest", "xgboost", "logistic-regression"])
def test_models_of_labels_teach_one_another(strategy: str, learner: str) -> None:
    """Agents hand on forests and learn from what these predict."""
    report = run(
        strategy=strategy,
        learner=learner,
        final_learner=learner,
        num_server_rounds=2,
    )

    assert report["accuracy"] > 0.8


def test_labelled_public_rows_help(chest: Path) -> None:
    """Parties that may use public labels end higher than those that may not."""
    alone, helped = (
        run(
            data="nih-cxr",
            data_dir=str(chest),
            learner="logistic-regression",
            final_learner="ridge",
            public_labels=use,
            train_rows=6,
            min_records=1,
        )["mean-auc"]
        for use in (False, True)
    )

    assert helped > alone


@pytest.fixture
def news(tmp_path: Path) -> Path:
    """Write short texts of four topics, each with words of its own."""
    rng = np.random.default_rng(1)
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["split", "label", "text"])
    for number in range(360):
        words = WORDS[number % 4].split()
        split = "train" if number < 240 else "test"
        table.writerow(
            [split, number % 4, " ".join(rng.permutation([*words[:2], "the", "of"]))]
        )
    (tmp_path / "ag_news.csv.xz").write_bytes(lzma.compress(text.getvalue().encode()))
    return tmp_path


@pytest.mark.parametrize(
    ("data", "learner", "final"),
    [
        ("ag-news", "logistic-regression,random-forest", "xgboost-scores"),
        ("ag-news-tokens", "embedding-bag", "embedding-bag"),
    ],
)
def test_texts(news: Path, data: str, learner: str, final: str) -> None:
    """Word weights suit any model, token numbers a network with an embedding."""
    report = run(
        data=data,
        data_dir=str(news),
        learner=learner,
        final_learner=final,
        epochs=15,
        learning_rate=0.02,
        beta=2.0,
    )

    assert report["accuracy"] > 0.8


def test_public_images_of_another_alphabet(tmp_path: Path) -> None:
    """Digits are private, letters public, and two rounds find the scale by themselves."""
    rng = np.random.default_rng(2)

    def drawn(size: int, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(size) % num_classes
        x = rng.integers(0, 60, (size, 28, 28), dtype=np.uint8)
        for image, label in zip(x, y, strict=True):
            image[2 * label : 2 * label + 8, 4:24] += 150
        return x, y

    for file, size, count in (("mnist", 300, 10), ("emnist_letters_af", 200, 6)):
        (x, y), (x_test, y_test) = drawn(size, count), drawn(80, count)
        names = np.array([str(number) for number in range(count)])
        np.savez(
            tmp_path / f"{file}.npz",
            x_train=x,
            y_train=y,
            x_test=x_test,
            y_test=y_test,
            classes=names,
        )

    report = run(
        data="mnist",
        public="emnist-letters",
        data_dir=str(tmp_path),
        learner="mlp",
        final_learner="mlp",
        scale="max",
        weights="counts",
        num_server_rounds=2,
        epochs=20,
    )

    assert report["accuracy"] > 0.5
    assert report["ledger"]["entries"]
    assert "largest logit" in report["privacy-statement"]


def test_the_federation_knows_its_task(chest: Path) -> None:
    """Parties and strategy are built for the data set's task."""
    given = {**COMMON, "data": "nih-cxr", "data-dir": str(chest), "final-learner": "ridge"}
    federation = load_federation(Settings.from_run_config(given))

    assert federation.metric == "mean-auc"
    assert federation.party(0).task == "multi-label"
    assert federation.party(0).public_y is not None
