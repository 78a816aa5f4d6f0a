"""What a run leaves behind, and what it says meanwhile."""

import io
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from sklearn.tree import DecisionTreeClassifier

from clients import ModelCard, SklearnLearner, client_app, load_model
from fl_strategies import FedKD, Party
from fl_strategies.errors import InvalidData
from simulations.__main__ import main
from simulations.config import Settings
from simulations.federation import load_federation
from simulations.results.run_folder import (
    RunFolder,
    flagged,
    read_json,
    unflagged,
    write_json,
    write_run,
)
from simulations.runtime import local, progress
from simulations.runtime.local import Finished, run_federation, run_local
from simulations.runtime.progress import Lines, Watch, log_level, no_louder_than, watching

FAST = [
    "--set=num-parties=3",
    "--set=num-trees=5",
    "--set=num-workers=1",
    "--learner=random-forest,logistic-regression",
    "--set=pooled=false",
]


def run(folder: Path, *more: str) -> Path:
    """Run a small federation by the command line and return its folder."""
    assert main(["run", *FAST, f"--set=output-dir={folder}", *more]) == 0
    (kept,) = folder.iterdir()
    return kept


def test_a_run_leaves_its_model_result_page_and_statement(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model is as good as the result says, and the page is named at the end."""
    kept = run(tmp_path)
    told, said = capfd.readouterr()
    report = json.loads((kept / "result.json").read_text(), parse_constant=pytest.fail)

    data = load_federation(Settings.from_run_config(report["settings"])).dataset
    accuracy = float((load_model(kept).predict(data.x_test) == data.y_test).mean())

    assert {path.name for path in kept.iterdir()} == {
        "epsilon.csv",
        "model",
        "privacy.txt",
        "report.html",
        "result.json",
    }
    assert accuracy == report["accuracy"]
    assert report["epsilon-party"] is None
    assert report["epsilon-party-unbounded"] is True
    assert (kept / "privacy.txt").read_text().strip() == report["privacy-statement"]
    assert told.splitlines()[-1] == f"report: {kept / 'report.html'}"
    lines = said.splitlines()
    assert lines[0] == (
        "fedkd on digits: 3 parties with 1078 records, 359 public rows, one round"
    )
    # On a slow machine lines in between say how far it is.
    assert lines[-1] == "3 of 3 parties trained alone, to compare"
    assert {"3 of 3 parties have trained", "3 of 3 parties have the result"} < {*lines}


def test_a_quiet_run_still_has_the_time_of_each_part(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It prints the result only; parties and server took as long as the federation."""
    report = read_json("test", run(tmp_path, "--quiet") / "result.json")

    told, said = capfd.readouterr()
    assert said == ""
    assert "verdict: " in told
    phases = report["phases"]
    assert list(phases) == ["loading", "comparison", "training", "evaluation", "aggregation"]
    parts = (phases[key] for key in ("training", "evaluation", "aggregation"))
    assert sum(parts) == pytest.approx(report["seconds"])
    assert all(seconds > 0 for seconds in phases.values())


def test_one_party_is_warned(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It has nobody to learn from, whatever the figures say."""
    run(tmp_path, "--set=num-parties=1")

    said = capfd.readouterr().err
    assert ": one party with " in said
    assert "warning: one party has nobody to learn from; num-parties is 1" in said


def test_verbose_shows_the_log_of_flower(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who asks sees what Flower says of every round; nobody else does."""
    run(tmp_path / "verbose", "--verbose")
    assert any("[ROUND 1/1]" in record.getMessage() for record in caplog.records)
    caplog.clear()

    run(tmp_path / "plain")

    assert not caplog.records


def test_a_model_that_cannot_travel_is_explained(tmp_path: Path) -> None:
    """The report says why there is no model, and nothing of it is left."""
    kept = run(tmp_path, "--strategy=fedkt", "--set=final-learner=svm", "--set=solo=false")
    report = read_json("test", kept / "result.json")

    assert "must have an array form, got SVC" in report["model"]["missing"]
    assert not (kept / "model").exists()
    assert "No model was saved: SklearnLearner" in (kept / "report.html").read_text()


def test_ctrl_c_while_comparing_keeps_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The federation is finished by then: its model and its figures stay."""
    whole = Finished.report

    def stopped(self: Finished, model: Any = None) -> Any:
        if self.federation.settings.solo:
            raise KeyboardInterrupt
        return whole(self, model)

    monkeypatch.setattr(Finished, "report", stopped)

    code = main(["run", *FAST, f"--set=output-dir={tmp_path}"])

    (kept,) = tmp_path.iterdir()
    report = read_json("test", kept / "result.json")
    assert code == 130
    assert "Stopped while models were trained to compare with" in capsys.readouterr().err
    assert report["accuracy"] > 0.5
    assert report["solo-accuracy"] is None
    assert load_model(kept).num_classes == 10


def test_ctrl_c_while_training_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback, exit code 130, and no folder of a run that has no result."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("simulations.runtime.local.run_local", interrupted)

    code = main(["run", *FAST, f"--set=output-dir={tmp_path}"])

    assert code == 130
    assert capsys.readouterr().err.endswith("\nStopped. Nothing is finished.\n")
    assert list(tmp_path.iterdir()) == []

    kept = f"--set=checkpoint-dir={tmp_path}/kept"
    assert main(["run", *FAST, f"--set=output-dir={tmp_path}", kept]) == 130
    assert (
        f"What has arrived is in {tmp_path}/kept; --set resume=true" in capsys.readouterr().err
    )


def test_ctrl_c_between_repeated_runs_keeps_those_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table and the file have the finished seeds."""
    whole = local.run_once

    def stopping(settings: Settings) -> Any:
        if settings.seed == 1:
            raise KeyboardInterrupt
        return whole(settings)

    monkeypatch.setattr(local, "run_once", stopping)
    target = tmp_path / "out.json"

    code = main(["repeat", *FAST, "--set=solo=false", "--seeds=0,1,2", f"--json={target}"])

    told = capsys.readouterr()
    assert code == 130
    assert "Stopped. Finished: 1 of 3 runs." in told.err
    assert "accuracy" in told.out
    assert len(json.loads(target.read_text())["runs"]) == 1


@pytest.mark.slow
def test_a_real_ctrl_c_ends_in_a_sentence(tmp_path: Path) -> None:
    """A signal to the whole process group, as a terminal sends it, leaves no traceback."""
    arguments = ["run", "--strategy=fedkt", f"--set=output-dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "simulations", *arguments, "--set=num-trees=3000"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # As a terminal starts it, even if these tests run in the background of a shell.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert "parties with" in process.stderr.readline()
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=60)[1]

    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert "Stopped." in rest


def test_lines_are_few_however_many_rounds_there_are() -> None:
    """The first and the last round are told, and others only if they take long."""
    stream = io.StringIO()
    watch = Lines(50, stream)
    for number in range(1, 51):
        for count in range(1, 11):
            watch.answered(progress.TRAIN, count, 10, number)

    assert stream.getvalue().splitlines() == [
        "round 1 of 50: 10 of 10 parties have trained",
        "round 50 of 50: 10 of 10 parties have trained",
    ]


def test_long_work_is_told_before_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits sees how far it is."""
    stream = io.StringIO()
    watch = Lines(1, stream)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)

    watch.answered(progress.TRAIN, 1, 10)

    assert stream.getvalue() == "1 of 10 parties have trained\n"


def test_a_terminal_has_bars(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They end in the same lines."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    with watching(1) as watch:
        watch.say("first [bold]line[/bold]")
        watch.stepped("party 1 of 2: 3 of 5 epochs")
        for count in (1, 2):
            watch.answered(progress.TRAIN, count, 2, 1)

    said = capfd.readouterr().err
    assert isinstance(watch, progress.Bars)
    assert "first [bold]line[/bold]" in said
    assert "2 of 2 parties have trained" in said


def test_a_terminal_without_rich_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower brings it today; nothing here needs it."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)

    with watching(1) as watch:
        assert isinstance(watch, Lines)


def test_the_log_is_as_loud_afterwards_as_before() -> None:
    """Levels are borrowed, and nobody makes a quiet log louder."""
    logger = logging.getLogger("flwr")
    before = logger.level
    with log_level(logging.CRITICAL), no_louder_than(logging.WARNING):
        assert logger.level == logging.CRITICAL
    assert logger.level == before


def test_infinity_is_null_with_a_flag(tmp_path: Path) -> None:
    """Standard JSON comes back as it was, except that NaN stays unknown."""
    content = {
        "epsilon": math.inf,
        "by-party": [1.0, math.nan],
        "inner": [{"epsilon": math.inf, "delta": 0.1}],
        "is-unbounded": True,
    }
    write_json(content, tmp_path / "a.json")

    plain = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)

    assert plain["epsilon"] is None
    assert plain["epsilon-unbounded"] is True
    assert plain["inner"][0]["epsilon-unbounded"] is True
    assert read_json("test", tmp_path / "a.json") == {**content, "by-party": [1.0, None]}
    assert unflagged(flagged({"a": math.inf})) == {"a": math.inf}


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_a_file_that_is_no_result_is_one_sentence(text: str, tmp_path: Path) -> None:
    """Whatever it holds."""
    (tmp_path / "a.json").write_text(text)

    with pytest.raises(InvalidData, match=r"report: .* must be"):
        read_json("report", tmp_path / "a.json")


@pytest.mark.parametrize("strategy", ["akd", "avgkd", "ekd", "fens"])
def test_the_saved_model_is_the_one_that_was_evaluated(strategy: str, tmp_path: Path) -> None:
    """Where models are relayed it is one agent's, a mean or a sum, each under its own name."""
    settings = Settings.of(
        strategy=strategy,
        num_parties=3,
        num_trees=5,
        boosting_rounds=5,
        learner="random-forest,xgboost,logistic-regression",
        num_server_rounds=2,
        num_workers=1,
    )
    finished = run_federation(settings, Watch())

    told = RunFolder(tmp_path).keep_model(finished.federation, finished.strategy)

    rows = finished.federation.dataset.x_test
    expected = finished.strategy.model_.logits(rows)
    assert "missing" not in told
    assert told["num-bytes"] > 0
    assert np.array_equal(load_model(tmp_path).logits(rows), expected)


# A federation written in Python


def tree() -> SklearnLearner:
    return SklearnLearner(DecisionTreeClassifier(random_state=0), num_classes=2)


def test_a_federation_in_python_leaves_a_report_and_a_model_to_load(tmp_path: Path) -> None:
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
