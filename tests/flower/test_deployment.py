"""A deployed federation: files, keys and node-configs of parties, and their real processes."""

import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.config import flatten_dict, parse_config_args
from sklearn.datasets import load_breast_cancer

from clients import SklearnLearner, client_app
from clients.app import FAILED, MAX_RUNS
from fl_strategies import KnowledgeStrategy, Party
from fl_strategies._compat import assign_message_id, claim_task_identity
from fl_strategies.errors import InvalidData, InvalidParameter, RunFailed
from fl_strategies.wire import keys
from simulations.config import Settings, Value
from simulations.deploy.__main__ import main
from simulations.deploy.client_app import app as deployed_app
from simulations.deploy.client_app import build_party, load_party, save_model
from simulations.deploy.data import (
    class_indices,
    class_list,
    read_labelled,
    read_public,
    write_labelled,
)
from simulations.deploy.federation import (
    CredentialsFailed,
    Deployment,
    Prepared,
    make_certificates,
    make_node_key,
    prepare,
    write_app,
    write_split,
)
from simulations.deploy.server_app import load, make_report, model_hash, run_settings
from simulations.federation import load_federation
from simulations.runtime.client_app import app as simulated_app
from simulations.runtime.flower import FlowerRunFailed, to_toml
from simulations.runtime.local import run_local
from tests.faults.federation import run_config
from tests.leftovers import living, wait_until

NUM_PARTIES = 3
PATIENCE = 480.0
SETTINGS = Settings.of(
    strategy="fedkt",
    num_parties=NUM_PARTIES,
    num_teachers=2,
    num_trees=10,
    boosting_rounds=10,
    epochs=3,
    learner="random-forest,xgboost,mlp",
    seed=4,
    max_wait=240.0,
    num_workers=1,
)
FEDKT = SETTINGS
PETS = ("cat", "dog")
DEPLOYMENT = Path(__file__).parents[2] / "docs" / "deployment.md"


# Files


@pytest.mark.parametrize("ending", ["npz", "csv", "csv.gz", "parquet"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_format_keeps_every_bit(tmp_path: Path, ending: str, dtype: type) -> None:
    """Rows and labels come back from each kind of file as they were."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(50, 2, 3)) * 10.0 ** rng.integers(-20, 20, (50, 2, 3))).astype(dtype)
    y = rng.integers(0, 2, 50)
    write_labelled(tmp_path / "public.npz", x, None, PETS)
    write_labelled(tmp_path / f"mine.{ending}", x, y, PETS)

    public = read_public(tmp_path / "public.npz", PETS)
    read_x, read_y = read_labelled(tmp_path / f"mine.{ending}", public)

    assert public.y is None
    assert read_x.dtype == dtype
    assert read_x.tobytes() == x.tobytes()
    assert read_y.tolist() == y.tolist()


def test_a_public_table_decides_what_columns_mean(tmp_path: Path) -> None:
    """Columns are found by name, encoded by public categories and scaled by public rows."""
    (tmp_path / "public.csv").write_text("age,town\n20,Ulm\n40,Bonn\n")
    (tmp_path / "mine.csv").write_text("town,kind,age\nBonn,dog,50\nKiel,cat,30\n")
    public = read_public(tmp_path / "public.csv", PETS, "kind")

    x, y = read_labelled(tmp_path / "mine.csv", public, "kind")

    assert public.x.tolist() == [[-1, 0, 1], [1, 1, 0]]
    assert x.tolist() == [[2, 1, 0], [0, 0, 0]]
    assert y.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("kind,age\ndog,1\n", "those of the public file"),
        ("kind,age,town,more\ndog,1,Ulm,2\n", "those of the public file"),
        ("kind,age,town\nbird,1,Ulm\n", "in the class list cat, dog, got 1 others"),
        ("kind,age,town\nbird,1,Ulm\nmouse,,\n", "in the class list cat, dog, got 2 others"),
        ("age,town\n1,Ulm\n", "must be one of the columns, got 'kind', which is missing"),
        ("", "a table"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    """Each way not to fit the public file has its sentence, which quotes no value."""
    (tmp_path / "public.csv").write_text("age,town\n20,Ulm\n40,Bonn\n")
    (tmp_path / "mine.csv").write_text(text)
    public = read_public(tmp_path / "public.csv", PETS, "kind")

    with pytest.raises((InvalidData, InvalidParameter), match=rule) as caught:
        read_labelled(tmp_path / "mine.csv", public, "kind")
    assert "bird" not in str(caught.value)


def test_an_archive_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A table must have as many columns as the public rows, and a file be of a known kind."""
    write_labelled(tmp_path / "public.npz", np.ones((4, 2), np.float32), None, PETS)
    public = read_public(tmp_path / "public.npz", PETS)
    write_labelled(tmp_path / "long.npz", np.ones((4, 3)), np.zeros(4, int), PETS)
    write_labelled(tmp_path / "wide.csv", np.ones((4, 3)), np.zeros(4, int), PETS)

    with pytest.raises(InvalidData, match=r"rows of shape \(2,\) like public rows, got \(3,\)"):
        read_labelled(tmp_path / "long.npz", public)
    with pytest.raises(InvalidData, match="2 columns and a label, got 3"):
        read_labelled(tmp_path / "wide.csv", public)
    with pytest.raises(InvalidParameter, match="ends in"):
        read_labelled(tmp_path / "records.pickle", public)


@pytest.mark.parametrize("name", ["double.npz", "whole.npz", "text.csv"])
def test_rows_get_the_number_type_of_the_public_ones(tmp_path: Path, name: str) -> None:
    """Which type a file has may depend on one record, so none is refused for it."""
    write_labelled(tmp_path / "public.npz", np.eye(4, 2, dtype=np.float32), None, PETS)
    public = read_public(tmp_path / "public.npz", PETS)
    whole = np.full((4, 2), 3)
    write_labelled(tmp_path / "whole.npz", whole, np.arange(4) % 2, PETS)
    write_labelled(tmp_path / "double.npz", whole + 0.0, np.arange(4) % 2, PETS)
    (tmp_path / "text.csv").write_text("a,b,label\n3,3,cat\n3,Ulm,dog\n3,3,cat\n3,3,bird\n")

    x, y = read_labelled(tmp_path / name, public)

    assert x.dtype == np.float32
    is_text = name == "text.csv"
    assert x.tolist() == [[3, 3], [3, 0 if is_text else 3], [3, 3], [3, 3]]
    assert y.tolist() == [0, 1, 0, 0 if is_text else 1]


def test_a_servers_test_file_has_no_other_labels(tmp_path: Path) -> None:
    """What is not a party's is refused rather than repaired."""
    (tmp_path / "public.csv").write_text("age,town\n20,Ulm\n40,Bonn\n")
    (tmp_path / "test.csv").write_text("age,town,label\n20,Ulm,cat\n40,Bonn,bird\n")
    public = read_public(tmp_path / "public.csv", PETS)

    with pytest.raises(InvalidData, match="in the class list cat, dog, got 1 others"):
        read_labelled(tmp_path / "test.csv", public, strict=True)


def test_the_class_list_has_one_order() -> None:
    """However a member writes the list, a label gets the same index."""
    assert class_list("dog, cat") == class_list("cat,dog") == PETS
    assert class_list("10,9,-1") == ("-1", "9", "10")
    assert class_indices("file", np.array([9.0, -1.0]), ("-1", "9")).tolist() == [1, 0]
    with pytest.raises(InvalidParameter, match="at least 2"):
        class_list("cat,cat")


# Parties


@pytest.fixture
def node_config(tmp_path: Path) -> dict[str, Value]:
    """Return the smallest node-config, of a party with 30 records."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(30, 4)).astype(np.float32), rng.integers(0, 2, 30)
    write_labelled(tmp_path / "mine.csv", x, y, PETS)
    write_labelled(tmp_path / "public.npz", x[:20] + 1, None, PETS)
    return {
        "partition-id": 0,
        "data-file": str(tmp_path / "mine.csv"),
        "public-file": str(tmp_path / "public.npz"),
        "classes": "cat,dog",
        "learner": "random-forest",
        "num-trees": 3,
    }


def context(node_config: dict[str, Value], **run_config: Value) -> Context:
    return Context(7, 1, dict(node_config), RecordDict(), dict(run_config))


def test_the_run_cannot_change_a_party(node_config: dict[str, Value], tmp_path: Path) -> None:
    """Whatever the run's configuration says about files, models and budgets is not read."""
    node_config |= {"state-dir": str(tmp_path / "state"), "max-epsilon": 1}
    wishes: dict[str, Value] = {
        "data-file": "/etc/passwd",
        "learner": "os:system",
        "state-dir": "/tmp/elsewhere",  # noqa: S108 - never used
        "max-epsilon": 1e9,
        "num-trees": 100_000,
        "tell-verdict": True,
    }

    party = load_party(context(node_config, **wishes))

    assert (party.partition_id, party.learner_name, len(party.y)) == (0, "random-forest", 30)
    assert party.journal is not None
    assert (party.journal.folder, party.journal.max_epsilon) == (tmp_path / "state", 1.0)
    assert party.run == "7"
    assert (party.compare_at_home, party.tell_verdict) == (True, False)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"max-epsilom": 1.0}, "keys must be among .* got .'max-epsilom'."),
        ({"max-epsilon": 1.0}, "state-dir must be given with max-epsilon"),
        ({"max-epsilon": -1.0}, "max-epsilon must be at least 0"),
        ({"max-epsilon": "1"}, "max-epsilon must be a number"),
        ({"compare": False, "tell-verdict": True}, "tell-verdict must be false without"),
        ({"partition-id": -1}, "partition-id must be at least 0"),
        ({"learner": ""}, "learner must be given"),
        ({"learner": "crystal-ball"}, "learner must be one of random-forest"),
        ({"receives": "mlp, crystal-ball"}, "receives must be one of random-forest"),
        ({"learner": "no_such_module:make"}, "learner must name a function"),
        ({"data-file": "/nowhere.csv"}, "data-file must be a file that exists"),
        ({"data-file": "mine.csv"}, "data-file must be an absolute path"),
        ({"state-dir": "state"}, "state-dir must be an absolute path"),
        ({"num-trees": "many"}, "num-trees must be a whole number"),
    ],
)
def test_a_wrong_node_config_is_refused(
    node_config: dict[str, Value], change: dict[str, Value], rule: str
) -> None:
    """Each mistake, also one in the name of the budget, has its sentence."""
    with pytest.raises((InvalidParameter, InvalidData), match=rule):
        build_party({**node_config, **change}, run="1")


def test_a_party_can_check_its_node_config(
    node_config: dict[str, Value], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any run, and without one: what is there, what is spent, or what is wrong."""
    file = tmp_path / "node.toml"
    node_config |= {"state-dir": str(tmp_path / "state"), "max-epsilon": 2.0}
    file.write_text(to_toml(node_config).replace(" ", "\n"))

    assert main(["check", str(file)]) == 0
    assert "Party 0: 30 records of shape (4,)" in (said := capsys.readouterr().out)
    assert "epsilon 0 of an example is spent, of 2,\nat delta 1e-05, in 0 releases" in said
    file.write_text('data-fil = "x"')
    assert main(["check", str(file)]) == 1
    assert "keys must be among" in capsys.readouterr().err
    file.write_text("no toml")
    assert main(["check", str(file)]) == 1
    assert "must be a file in TOML" in capsys.readouterr().err


def test_the_server_is_not_told_what_is_wrong_at_a_party(
    node_config: dict[str, Value], caplog: pytest.LogCaptureFixture
) -> None:
    """The reply names no file; the party's own log does."""
    node_config["data-file"] = "/secret-place/patients.csv"

    claim_task_identity()
    question = RecordDict({keys.CONFIG: ConfigRecord({keys.STRATEGY: "fedkt"})})
    message = Message(question, dst_node_id=1, message_type="train")
    assign_message_id(message)

    reply = deployed_app(message, context(node_config))

    assert "secret-place" not in str(reply.error.reason)
    assert reply.error.reason == FAILED
    assert "secret-place" in caplog.text


def test_a_party_brings_its_own_model(
    node_config: dict[str, Value], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``module:function`` is found on the party's path and told the shape of the data."""
    (tmp_path / "hospital_models.py").write_text(
        "from sklearn.naive_bayes import GaussianNB\n"
        "from clients import SklearnLearner\n"
        "def bayes(*, row_shape, num_classes):\n"
        "    assert row_shape == (4,)\n"
        "    return SklearnLearner(GaussianNB(), num_classes=num_classes)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    party = build_party({**node_config, "learner": "hospital_models:bayes"}, run="1")

    model = party.learner_fn().fit(party.x, party.y, rng=np.random.default_rng(0))
    assert isinstance(model, SklearnLearner)
    assert model.predict(party.public).shape == (20,)


def test_a_party_keeps_the_model_it_was_given(
    node_config: dict[str, Value], tmp_path: Path
) -> None:
    """The final model is in the state folder, under the run's number, bit by bit."""
    node_config["state-dir"] = str(tmp_path / "state")
    party = build_party(node_config, run="7")
    model = party.learner_fn().fit(party.x, party.y, rng=np.random.default_rng(0))

    save_model(model, party, context(node_config))

    with np.load(tmp_path / "state" / "model-7.npz", allow_pickle=False) as kept:
        assert model_hash(party.learner_fn().from_arrays(dict(kept))) == model_hash(model)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["model-7.npz"]

    for number in range(8, 20):
        save_model(model, party, Context(number, 1, {}, RecordDict(), {}))
    assert len(list((tmp_path / "state").iterdir())) == MAX_RUNS, "runs must not fill the disk"


# The whole federation without its processes


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Return the folders of three parties, each with another format and model."""
    return prepare(SETTINGS, tmp_path_factory.mktemp("prepared") / "federation")


def party_of(prepared: Prepared, **change: Value) -> Callable[[Context], Party]:
    """Return how the in-process runner loads a party from its node-config."""

    def load_one(given: Context) -> Party:
        member = prepared.members[int(given.node_config[keys.PARTITION_ID])]
        config = tomllib.loads(member.node_config.read_text())
        return build_party({**config, **change}, run=str(given.run_id))

    return load_one


def in_process(settings: Settings) -> KnowledgeStrategy[Any]:
    """Return the strategy after a run of the simulated federation in this process."""
    strategy = load_federation(settings).strategy()
    run_local(
        strategy,
        simulated_app,
        NUM_PARTIES,
        num_rounds=settings.num_rounds,
        run_config=settings.to_run_config(),
    )
    return strategy


def test_files_and_configs_make_the_simulated_federation(
    prepared: Prepared, tmp_path: Path
) -> None:
    """Three formats, three node-configs and the server's files end in the same bits."""
    federation = load(run_config(prepared, FEDKT))
    strategy, app = federation.strategy(), client_app(party_of(prepared, **_state(tmp_path)))
    result = run_local(strategy, app, NUM_PARTIES)

    report = make_report(federation, strategy, result, seconds=0.0)

    expected = in_process(FEDKT)
    assert report["model-sha256"] == model_hash(expected.model_)
    assert report["accuracy"] == load_federation(FEDKT).quality(expected.model_)
    assert [party["learner"] for party in report["parties"]] == list(SETTINGS.learner_names)


def test_a_party_with_a_budget_refuses_a_run_without_noise(
    prepared: Prepared, tmp_path: Path
) -> None:
    """Its own limit holds, whatever the server asks for, and its journal stays empty."""
    app = client_app(party_of(prepared, **_state(tmp_path), **{"max-epsilon": 2.0}))
    strategy = load(run_config(prepared, FEDKT)).strategy()

    with pytest.raises(RunFailed, match=r"0 of 3 parties .* all the same: none\."):
        run_local(strategy, app, NUM_PARTIES)

    assert not list(tmp_path.glob("**/*.jsonl"))


def test_the_run_of_the_docs_reaches_the_party_of_the_docs(tmp_path: Path) -> None:
    """docs/deployment.md's own node.toml and run: each party pays once and has the model."""
    text = DEPLOYMENT.read_text(encoding="utf-8")
    (node,) = re.findall(r"```toml\n(partition-id.*?)```", text, re.DOTALL)
    (run,) = re.findall(r"--run-config '(.*?)'", text, re.DOTALL)
    config = flatten_dict(parse_config_args([" ".join(run.split())]))
    write_tables(tmp_path, int(config["num-parties"]))

    def load_one(given: Context) -> Party:
        number = int(given.node_config[keys.PARTITION_ID])
        own = {
            keys.PARTITION_ID: number,
            "data-file": str(tmp_path / f"patients-{number}.csv"),
            "public-file": str(tmp_path / "public.csv"),
            "state-dir": str(tmp_path / f"state-{number}"),
        }
        return build_party({**tomllib.loads(node), **own}, run=str(given.run_id))

    files = {key: str(tmp_path / Path(str(config[key])).name) for key in FILES}
    federation = load({**config, **files, "members-file": ""})
    strategy = federation.strategy()
    app = client_app(load_one, on_model=save_model)
    result = run_local(strategy, app, int(config["num-parties"]))
    report = make_report(federation, strategy, result, seconds=0.0)

    for number in range(int(config["num-parties"])):
        folder = tmp_path / f"state-{number}"
        (journal,) = folder.glob("*.jsonl")
        assert len(journal.read_text().splitlines()) == 1
        assert len(list(folder.glob("model-*.npz"))) == 1, "a party has paid for nothing"
    assert report["rejected"] == report["undelivered"] == {}
    assert report["accuracy"] > 0.8


FILES = ("public-file", "test-file")


def write_tables(folder: Path, num_parties: int) -> None:
    """Write tables as docs/deployment.md names them: public, test, and one per party."""
    data = load_breast_cancer()
    table = pd.DataFrame(data.data, columns=data.feature_names)
    table["diagnosis"] = np.where(data.target == 0, "ill", "healthy")
    table = table.sample(frac=1, random_state=0)
    table[:114].drop(columns="diagnosis").to_csv(folder / "public.csv", index=False)
    table[114:228].to_csv(folder / "test.csv", index=False)
    for number in range(num_parties):
        table[228 + number :: num_parties].to_csv(
            folder / f"patients-{number}.csv", index=False
        )


def test_a_party_finds_out_beforehand_that_it_could_not_read_a_model(
    node_config: dict[str, Value], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` names usual models that are not in `receives`, and answers for one run."""
    file = tmp_path / "node.toml"
    node_config |= {"receives": "mlp", "allow-unprotected": True}
    file.write_text(to_toml(node_config).replace(" ", "\n"))
    command = ["check", str(file), "--set", "strategy=fedregression"]

    assert main([*command[:2]]) == 0
    said = capsys.readouterr().out
    assert "reads models of: logistic-regression, mlp, moments, random-forest, ridge\n" in said
    assert "cannot read: extra-trees, the usual final model of fedkt; add it to rec" in said
    assert main(command) == 0
    assert "this run: the party takes part" in capsys.readouterr().out
    assert main([*command, "--set", "final-learner=extra-trees"]) == 1
    assert "got 'extra-trees'. Add it to the party's catalogue, which is receives in" in (
        capsys.readouterr().err
    )


def _state(folder: Path) -> dict[str, Value]:
    # One process stands for all parties; each data set keeps its own name in real ones.
    return {"state-dir": str(folder / "state"), "data-changes": True}


def test_the_server_needs_its_files(prepared: Prepared) -> None:
    """A run without a public file or with one that is not there is refused at once."""
    config = run_config(prepared, FEDKT)

    with pytest.raises(InvalidParameter, match="public-file must be given"):
        load({**config, "public-file": ""})
    with pytest.raises(InvalidParameter, match="absolute path of a file on the server"):
        load({**config, "public-file": "nowhere.npz"})
    assert len(load({**config, "test-file": ""}).dataset.y_test) == 0


def test_the_app_folder_holds_no_code(tmp_path: Path) -> None:
    """What travels is one file of settings, which all are known and have the defaults."""
    folder = write_app(tmp_path / "app")

    assert [path.name for path in folder.rglob("*")] == ["pyproject.toml"]
    app = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert flatten_dict(app["config"]) == run_settings()
    assert app["components"]["clientapp"] == "simulations.deploy.client_app:app"


def test_a_folder_is_used_once(prepared: Prepared) -> None:
    """Keys of a federation are never written over."""
    with pytest.raises(InvalidParameter, match="folder must be a new one"):
        prepare(SETTINGS, prepared.folder)


def test_credentials_that_cannot_be_made_are_an_error(tmp_path: Path) -> None:
    """The sentence names the command; private keys are readable by their owner only."""
    key = tmp_path / "keys" / "node-key"
    make_node_key(key)
    certificates = make_certificates(tmp_path / "server")

    for private in (key, certificates.server_key):
        assert private.stat().st_mode & 0o077 == 0
    with pytest.raises(CredentialsFailed, match="ssh-keygen"):
        make_node_key(tmp_path / "keys" / "node-key")
    with pytest.raises(CredentialsFailed, match="openssl"):
        make_certificates(tmp_path / "other", names="NONSENSE")


def test_split_writes_a_file_for_each_party(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command names its files, and a format that nobody can read is an error."""
    assert main(["split", str(tmp_path), "--parties", "2", "--formats", "csv"]) == 0
    assert str(tmp_path / "party-1.csv") in capsys.readouterr().out
    assert main(["app", str(tmp_path / "app")]) == 0
    assert main(["split", str(tmp_path), "--formats", "xls"]) == 1
    assert "format must be one of" in capsys.readouterr().err
    with pytest.raises(InvalidParameter, match="format"):
        write_split(SETTINGS, tmp_path, ["pickle"])


# The real processes


@pytest.mark.deployment
def test_a_federation_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    """A key that cannot be registered ends the SuperLink that runs already."""
    prepared = prepare(SETTINGS, tmp_path / "federation")
    prepared.members[0].public_key.write_text("no key")
    deployment = Deployment(prepared)

    with pytest.raises(FlowerRunFailed, match="supernode"), deployment:
        pytest.fail("The federation must not start.")

    assert deployment.processes.living() == set()
    assert living(str(tmp_path)) == []


@pytest.mark.deployment
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, or a TERM, stops every process before the command ends."""
    work = tmp_path / "federation"
    command = [sys.executable, "-m", "simulations.deploy", "demo", "--work", str(work)]
    with subprocess.Popen(
        [*command, "--set=num-trees=3"], stdout=subprocess.PIPE, start_new_session=True
    ) as demo:
        assert demo.stdout is not None
        try:
            lines = iter(demo.stdout.readline, b"")
            assert any(b"Starting a SuperLink" in line for line in lines)
            wait_until(
                lambda: living("deploy.superlink", str(work)) != [] or demo.poll() is not None
            )
            demo.send_signal(number)
            code = demo.wait(PATIENCE)
        finally:
            demo.kill()

    assert code == 130
    assert living(str(work)) == []
