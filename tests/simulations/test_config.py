import re
import tomllib
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import flatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies.errors import InvalidParameter
from simulations.commands import main
from simulations.commands.run import with_block
from simulations.config import (
    TITLES,
    FinalOptions,
    Settings,
    Value,
    as_published,
    describe,
    paper_table,
    parse_assignments,
    preset,
)
from simulations.data.splits import SCHEMES
from simulations.federation import load_federation
from simulations.models import ModelOptions

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
DATA_SETS = ("adult", "cod-rna", "mnist")


def test_the_project_file_is_generated(tmp_path: Path) -> None:
    """`[tool.flwr.app.config]` is what `fl-strategies config --write` makes of the options."""
    whole = PYPROJECT.read_text()
    assert with_block(whole) == whole, "run: fl-strategies config --write"
    old = tmp_path / "pyproject.toml"
    old.write_text(whole.partition("[tool.flwr.app.config]")[0] + "[tool.flwr.app.config]\n")

    assert main(["config", "--write", str(old)]) == 0
    assert old.read_text() == whole


def test_the_block_has_every_setting_with_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Flower reads the defaults, in value and in type, and people read what they mean."""
    assert main(["config"]) == 0
    block = capsys.readouterr().out
    table = flatten_dict(tomllib.loads(block)["tool"]["flwr"]["app"]["config"])
    defaults = {key: default for key, default, _ in describe()}
    assert table == defaults
    assert {k: type(v) for k, v in table.items()} == {k: type(v) for k, v in defaults.items()}
    comments = re.findall(r"^([a-z0-9-]+) = .* # (.+)$", block, flags=re.MULTILINE)
    assert comments == [(key.rpartition(".")[2], meaning) for key, _, meaning in describe()]
    assert all(
        f"\n# {title}\n{key.rpartition('.')[2]} = " in block for key, title in TITLES.items()
    )


def test_left_out_keys_keep_their_defaults_and_overrides_win() -> None:
    """A partial configuration is enough, and a Python override beats it."""
    chosen = Settings.from_run_config({"num-parties": 8, "seed": 4}, seed=5)
    assert chosen == Settings.of(num_parties=8, seed=5)


def test_a_whole_number_stands_for_a_number() -> None:
    """`beta=1` is meant as 1.0 and becomes it."""
    beta = Settings.from_run_config({"beta": 1}).beta
    assert type(beta) is float
    assert beta == 1.0


def test_settings_cannot_change_and_can_be_compared_and_hashed() -> None:
    """A run's settings are a value: frozen, and equal settings are one key."""
    chosen = Settings()
    with pytest.raises(FrozenInstanceError):
        chosen.seed = 1  # type: ignore[misc]
    assert len({chosen, Settings(), Settings.of(seed=1)}) == 2


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("num_parties", "6", "a whole number, got '6'."),
        ("num_parties", 6.0, "a whole number, got 6.0."),
        ("num_parties", True, "a whole number, got True."),
        ("beta", "0.5", "a number, got '0.5'."),
        ("beta", False, "a number, got False."),
        ("beta", float("nan"), "finite, got nan."),
        ("timeout", float("inf"), "finite, got inf."),
        ("solo", 1, "true or false, got 1."),
        ("data", 3, "text, got 3."),
        ("num_parties", 0, "at least 1"),
        ("min_records", -1, "at least 0"),
        ("seed", -1, "at least 0"),
        ("max_depth", -1, "at least 0"),
        ("num_workers", -1, "at least 0"),
        ("boosting_gamma", -0.5, "at least 0"),
        ("weight_decay", -1e-5, "at least 0"),
        ("beta", 0.0, "greater than 0"),
        ("learning_rate", -0.1, "greater than 0"),
        ("max_wait", 0.0, "greater than 0"),
        ("mixing", -0.1, "at least 0"),
        ("shares", "half", "numbers with commas"),
        ("public", "digits", "empty, or with data one of mnist"),
        ("strategy", "fedxyz", "one of akd, avgkd"),
        ("partition", "random", "one of dirichlet, iid, by-label"),
        ("output_dir", "", "a folder"),
        ("data", "imagenet", "one of digits, breast-cancer, diabetes, adult, cod-rna"),
        ("learner", "random-forest,trees", "one of random-forest, extra-trees"),
        ("learner", "random-forest,", "one of random-forest"),
        ("teacher", "random-forest", "omitted unless for fedkt"),
        ("pretrain_once", True, "omitted unless for cronus or fedmd"),
    ],
)
def test_a_value_outside_its_rule_is_named(name: str, value: Any, rule: str) -> None:
    """The sentence gives key and type or rule, and ends with the value."""
    expected = f"Settings: {name.replace('_', '-')} must be {rule}"
    with pytest.raises(InvalidParameter, match=re.escape(expected)) as caught:
        Settings.of(**{name: value})
    assert repr(value).split(",")[-1].strip("'") in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "name", "value", "rule"),
    [
        ("fedkt", "num_splits", 0, "from 1 to 1000"),
        ("fedkt", "num_teachers", -1, "from 1 to 100000"),
        ("fedkt", "vote_weights", "much", "one of auto, none, counts, noisy-counts"),
        ("fedkt", "privacy_level", "L3", "one of L0, L1, L2"),
        ("fedkt", "exchange", "weights", "one of votes, models, scores"),
        ("fedkd", "num_levels", -1, "from 2 to 65536"),
        ("fedkd", "clip", 0.0, "greater than 0 and at most"),
        ("fedkd", "weights", "equal", "one of evidence, noisy-evidence, counts"),
        ("fedkd", "loss", "hinge", "one of l1, l2, mse, kl"),
        ("fedkd", "augmentation", "blur", "one of none, crop, crop-flip"),
        ("fedmd", "num_samples", 9, "omitted with these settings"),
        ("avgkd", "target_loss", "l1", "one of mse, cross-entropy"),
    ],
)
def test_a_value_outside_a_strategys_rule_is_named(
    strategy: str, name: str, value: Any, rule: str
) -> None:
    """Options say what they must be, whoever gives them."""
    with pytest.raises(InvalidParameter, match=re.escape(f"must be {rule}")):
        Settings.of(strategy=strategy, **{name: value})


def published(arguments: tuple[str, str, str]) -> Any:
    return preset(*arguments)


RUN = Settings.from_run_config


@pytest.mark.parametrize(
    ("read", "given", "message"),
    [
        (RUN, {"strategy": "fedkt", "weights": "counts"}, "got 'weights', which fedkd"),
        (RUN, {"strategy": "fedavg", "release": "nfdp"}, "a setting of fedavg, got 'release'"),
        (RUN, {"strategy": "avgkd", "delta-x": 1}, "got 'delta-x'. Did you mean 'delta'?"),
        (
            RUN,
            {"strategy": "fedkd", "num-techers": 1},
            "got 'num-techers'. Did you mean 'num-teachers', a setting of fedkt?",
        ),
        (RUN, {"fedmd.releas": "nfdp"}, "got 'releas'. Did you mean 'release'?"),
        (RUN, {"fedxy.release": "nfdp"}, "got 'fedxy'."),
        *(
            (RUN, {key: 1}, f"got {key!r}. {answer}")
            for key, answer in {
                "num_parties": "Did you mean 'num-parties'?",
                "num-partys": "Did you mean 'num-parties'?",
                "learners": "Did you mean 'learner'?",
                "final-leaner": "Did you mean 'final-learner'?",
                "Seed": "Did you mean 'seed'?",
                "xyzzy": "Known are ",
            }.items()
        ),
        (partial(RUN, num_party=3), {}, "got 'num-party'"),
        (parse_assignments, ["num-parties"], "of the form key=value, got 'num-parties'"),
        (parse_assignments, ["num-partys=3"], "Did you mean 'num-parties'?"),
        (parse_assignments, ["num-parties=3.5"], "must be a whole number, got '3.5'"),
        (parse_assignments, ["beta=much"], "beta must be a number, got 'much'"),
        (parse_assignments, ["solo=yes"], "solo must be true or false, got 'yes'"),
        (published, ("fast", "fedkt", "adult"), "name must be one of paper, got 'fast'"),
        (published, ("paper", "fedavg", "adult"), "must be one of fedkt, got 'fedavg'"),
        (published, ("paper", "../fedkt", "adult"), "one of fedkt, got '../fedkt'"),
        (published, ("paper", "fedkt", "digits"), "data must be one of adult, cod-rna, mnist"),
    ],
)
def test_what_is_no_setting_assignment_or_preset_is_refused(
    read: Callable[[Any], Any], given: Any, message: str
) -> None:
    """Nothing is dropped without a word: one sentence says what was meant, or all there are."""
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        read(given)


def test_sections_of_other_strategies_do_not_matter() -> None:
    """A run configuration has them all; the chosen strategy's own one counts."""
    whole = {key: default for key, default, _ in describe()}
    told = {**whole, "strategy": "fedmd", "fedmd.release": "nfdp", "fedmd.num-samples": 7}
    chosen = Settings.from_run_config({**told, "fedkt.num-splits": 3})
    assert chosen == Settings.of(strategy="fedmd", release="nfdp", num_samples=7)


@pytest.mark.parametrize("strategy", ["fedkd", "fedkt", "fedmd"])
def test_delta_can_be_chosen_without_noise(strategy: str) -> None:
    """Learners that train privately have one too."""
    federation = load_federation(Settings.of(strategy=strategy, delta=1e-6, num_parties=3))
    assert federation.strategy().ledger_.delta == 1e-6


def test_a_section_is_not_undone_by_a_default_for_all() -> None:
    """`max-epsilon` is the parties' budget too, and 0 there says nothing."""
    told = {"strategy": "fedkt", "fedkt.max-epsilon": 3.0, "max-epsilon": 0.0}
    assert Settings.from_run_config(told).chosen()["max-epsilon"] == 3.0


@pytest.mark.parametrize("data", ["my/rows.npz", "table.csv", "table.csv.gz", "table.csv.xz"])
def test_data_may_be_a_file(data: str) -> None:
    """A path is accepted by its ending; whether it exists is the loader's question."""
    assert Settings.of(data=data).data == data


def test_learners_and_shares_are_split_and_trimmed() -> None:
    """Spaces around the commas are allowed; an empty text means equal shares."""
    assert Settings.of(learner="svm, mlp ,xgboost").learner_names == ("svm", "mlp", "xgboost")
    assert Settings.of(shares="0.7, 0.3").party_shares == (0.7, 0.3)
    assert Settings().party_shares == ()


def final_of(strategy: str, **given: Any) -> ModelOptions:
    """Return the settings of the server's model."""
    return load_federation(Settings.of(strategy=strategy, **given)).final_settings


def test_the_final_model_has_settings_of_its_own() -> None:
    """The parties' small trees do not cut the server's."""
    parties = {"max_depth": 6, "num_trees": 9, "learner": "random-forest"}
    assert final_of("fedkt", **parties) == FinalOptions()
    assert final_of("fedkt", **parties, **{"final.max-depth": 2}) == FinalOptions(max_depth=2)
    federation = load_federation(Settings.of(strategy="fedkd", **parties))
    forest: Any = federation.party(0).learner_fn()
    assert (forest._template.max_depth, forest._template.n_estimators) == (6, 9)
    final: Any = federation.final_factory()()
    assert (final._template.max_depth, final._template.n_estimators) == (None, 100)
    received: Any = federation.party(0).catalogue["extra-trees"]()
    assert received._template.n_estimators == 100


def test_a_model_that_travels_to_and_fro_has_the_parties_settings() -> None:
    """Averaged weights belong to one network; what is set of the final one still counts."""
    chosen = final_of("fedavg", learner="mlp", epochs=9, batch_size=4, **{"final.epochs": 2})
    assert (chosen.epochs, chosen.batch_size) == (2, 4)


def test_a_wrong_setting_of_the_final_model_is_named() -> None:
    """Its key has the section before it."""
    with pytest.raises(InvalidParameter, match=r"final: max-depth must be at least 0, got -1"):
        Settings.of(**{"final.max-depth": -1})
    with pytest.raises(InvalidParameter, match=r"got 'final.max-dept'. Did you mean 'final"):
        Settings.from_run_config({"final.max-dept": 1})
    assert parse_assignments(["final.ridge=1"]) == {"final.ridge": 1.0}


def test_old_names_work_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    """For one release; their defaults, which every run configuration has, say nothing."""
    assert Settings.of(final_learner_epochs=2, final_learner_rate=0.5).final == FinalOptions(
        epochs=2, learning_rate=0.5
    )
    assert "Settings: final-learner-epochs is now final.epochs" in caplog.text
    caplog.clear()
    assert not Settings.from_run_config(parse_assignments(["central=false"])).pooled
    assert Settings.of(central_learner="svm").pooled_learner == "svm"
    assert "central is now pooled" in caplog.text
    (old,) = parse_assignments(["final-learner-batch-size=8"]).items()
    assert Settings.from_run_config(dict([old])).final.batch_size == 8
    caplog.clear()
    defaults = {key: default for key, default, _ in describe()}
    assert Settings.from_run_config({**defaults, "final.epochs": 7}).final.epochs == 7
    assert caplog.text == ""


def test_papers_have_one_set_of_hyper_parameters_for_all_models() -> None:
    """Their tables are what they were when the final model had the parties' settings."""
    chosen = Settings.from_run_config(
        as_published({"epochs": 3, "batch-size": 4, "final-learner-epochs": 9, "beta": 0.1})
    )
    assert (chosen.epochs, chosen.batch_size) == (3, 4)
    assert chosen.final == FinalOptions(epochs=9, batch_size=4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num-parties=8", ("num-parties", 8)),
        ("beta=1", ("beta", 1.0)),
        ("beta = 1e-1", ("beta", 0.1)),
        ("solo=false", ("solo", False)),
        ("pooled=True", ("pooled", True)),
        ("data=a=b.csv", ("data", "a=b.csv")),
        ("teacher=", ("teacher", "")),
    ],
)
def test_an_assignment_takes_the_type_of_its_setting(
    text: str, expected: tuple[str, Value]
) -> None:
    """Text from the command line becomes text, number or truth value by key."""
    ((key, value),) = parse_assignments([text]).items()
    assert (key, value) == expected
    assert type(value) is type(expected[1])


@settings(deadline=None, max_examples=30)
@given(
    st.fixed_dictionaries(
        {
            "num_parties": st.integers(1, 10_000),
            "beta": st.floats(1e-6, 1e6),
            "solo": st.booleans(),
            "partition": st.sampled_from(SCHEMES),
            "label": st.text(max_size=20).map(str.strip),
        }
    )
)
def test_every_setting_can_be_given_on_the_command_line(values: dict[str, Any]) -> None:
    """Writing settings as key=value and reading them back changes nothing."""
    original = Settings.of(**values)
    texts = [f"{key}={value}" for key, value in original.to_run_config().items()]
    assert Settings.from_run_config(parse_assignments(texts)) == original


@pytest.mark.parametrize("data", DATA_SETS)
def test_a_preset_is_a_valid_configuration(data: str) -> None:
    """The paper's settings are accepted as they stand and name their data set."""
    chosen = Settings.from_run_config(preset("paper", "fedkt", data))
    assert (chosen.strategy, chosen.data) == ("fedkt", data)
    own = chosen.chosen()
    assert (chosen.beta, own["num-splits"], own["num-teachers"]) == (0.5, 2, 5)
    assert (own["corrected"], own["vote-weights"]) == (False, "none")
    assert chosen.num_parties == (10 if data == "mnist" else 50)


def test_the_adult_preset_has_trees_for_teachers_and_forests_for_students() -> None:
    """Adult's teachers, students and final model are those of the authors."""
    chosen = Settings.from_run_config(preset("paper", "fedkt", "adult"))
    assert (chosen.teacher, chosen.learner) == ("decision-tree", "random-forest")
    assert chosen.final_learner == "random-forest"
    assert (chosen.num_trees, chosen.max_depth, chosen.final.max_depth) == (100, 6, 6)


@pytest.mark.parametrize("data", DATA_SETS)
def test_a_paper_table_gives_figures_as_shares(data: str) -> None:
    """Published and expected accuracies lie between 0 and 1, and the floor below the paper."""
    table = paper_table("fedkt")[data]
    published, floor = table["published"], table["expected"]["accuracy-at-least"]
    assert 0.5 < published["solo-accuracy"] < floor < published["accuracy"] < 1
    assert published["source"].startswith("IJCAI 2021")
