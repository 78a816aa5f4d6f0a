"""The command line answers with the accountant's numbers, or one clear sentence."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fl_strategies
from fl_strategies.privacy import __main__ as command
from fl_strategies.privacy.__main__ import BOUNDS, main
from fl_strategies.privacy.bounds.moments import data_dependent_epsilon
from fl_strategies.privacy.bounds.theorems import default_orders, rdp_to_epsilon
from fl_strategies.privacy.events import NoisyMaxEvent
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.mechanisms import NoisyMax
from tests.audit import mechanisms as audit_suite

Captured = pytest.CaptureFixture[str]
ADULT = (
    "epsilon --mechanism laplace --classes 2 --gamma 0.04 --splits 1 --queries 40 "
    "--delta 1e-5 --unit party"
)


def ask(capsys: Captured, command: str, *more: str) -> dict[str, Any]:
    """Run a command with --json and return its answer."""
    code = main([*command.split(), *more, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    answer: dict[str, Any] = json.loads(captured.out)
    return answer


def refuse(capsys: Captured, command: str, *more: str) -> str:
    """Run a command that must fail and return its one sentence."""
    code = main([*command.split(), *more])
    captured = capsys.readouterr()
    assert code == 1
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line


def save(path: Path, votes: Any) -> str:
    """Write votes as a .npy file and return the option that names it."""
    np.save(path, np.asarray(votes))
    return f"--votes={path}"


def test_all_bounds_of_the_adult_setting(capsys: Captured) -> None:
    """The published 2.56 comes out of the moments; the claim is 2.7 times smaller."""
    answer = ask(capsys, ADULT)

    assert list(answer) == ["epsilon", "method", "bounds"]
    assert list(answer["bounds"]) == list(BOUNDS)
    assert answer["method"] == "bounded-range"
    assert answer["epsilon"] == pytest.approx(0.934913, abs=1e-6)
    assert answer["bounds"] == {
        "moments": pytest.approx(2.559, abs=5e-4),
        "optimal-composition": pytest.approx(1.932272, abs=1e-6),
        "bounded-range": pytest.approx(answer["epsilon"], abs=1e-6),
        "zcdp": pytest.approx(1.025440, abs=1e-6),
        "pld": None,
        "data-dependent": None,
    }


@settings(deadline=None, max_examples=15)
@given(
    noise=st.sampled_from(["laplace", "gumbel", "gaussian"]),
    unit=st.sampled_from(["party", "example"]),
    classes=st.integers(2, 12),
    parameter=st.floats(0.01, 3.0),
    splits=st.integers(1, 4),
    queries=st.integers(1, 200),
    delta=st.floats(1e-9, 0.1),
)
def test_the_claim_is_the_ledgers(
    noise: Any,
    unit: Any,
    classes: int,
    parameter: float,
    splits: int,
    queries: int,
    delta: float,
) -> None:
    """Whatever is asked, command line and ledger name the same smallest epsilon."""
    sensitivity, count = (splits, queries) if unit == "party" else (1, splits * queries)
    gaussian = noise == "gaussian"
    event = NoisyMaxEvent(
        unit=unit,
        relation="replace-one",
        noise=noise,
        num_classes=classes,
        scale=parameter if gaussian else 1 / parameter,
        sensitivity=sensitivity,
    )
    ledger = PrivacyLedger(unit, delta=delta)
    ledger.compose(event, count)
    with pytest.MonkeyPatch.context() as patch:
        written: list[str] = []
        patch.setattr(sys.stdout, "write", written.append)
        options = {
            "mechanism": noise,
            "classes": classes,
            "splits": splits,
            "queries": queries,
            "delta": delta,
            "unit": unit,
            "sigma" if gaussian else "gamma": parameter,
        }
        main(["epsilon", *(f"--{key}={value}" for key, value in options.items()), "--json"])
    answer = json.loads(written[0])
    bounds = [value for value in answer["bounds"].values() if value is not None]

    if answer["epsilon"] is None:
        assert ledger.get_epsilon() == math.inf
        return
    assert answer["epsilon"] == ledger.get_epsilon() >= min(bounds)
    assert answer["epsilon"] == pytest.approx(answer["bounds"][answer["method"]], rel=0.05)


def test_adaptive_queries_cost_more(capsys: Captured) -> None:
    """Bounded range holds for queries fixed in advance; otherwise its rho is composed."""
    answer = ask(capsys, ADULT, "--adaptive")

    assert answer["bounds"]["bounded-range"] is None
    assert (answer["method"], round(answer["epsilon"], 6)) == ("zcdp", 1.025440)


def test_more_releases_than_can_be_enumerated(capsys: Captured) -> None:
    """Beyond a million releases the claim may come from another bound, which is then shown."""
    command = "epsilon --mechanism laplace --classes 3 --gamma 1e-4 --splits 1 --unit party"
    answer = ask(capsys, command, "--queries=2000000")

    assert answer["bounds"]["optimal-composition"] is None
    assert answer["bounds"][answer["method"]] == answer["epsilon"]
    assert 0 < answer["epsilon"] < 2


def test_voters_give_the_loss_distribution(capsys: Captured) -> None:
    """The figure that knows the number of parties matches its reference value."""
    pytest.importorskip("dp_accounting")
    answer = ask(capsys, ADULT, "--voters=50")
    more = ask(capsys, ADULT, "--voters=1250")

    assert answer["bounds"]["pld"] == pytest.approx(1.007666, abs=1e-6)
    assert answer["epsilon"] == pytest.approx(0.934913, abs=1e-6)
    assert answer["bounds"]["pld"] < more["bounds"]["pld"]
    assert more == ask(capsys, ADULT, "--voters=10000")
    assert (
        ask(capsys, ADULT.replace("laplace", "gumbel"), "--voters=50")["bounds"]["pld"] is None
    )


def test_a_smaller_loss_distribution_is_the_claim(capsys: Captured) -> None:
    """With a single voter and little noise the exact distribution wins."""
    pytest.importorskip("dp_accounting")
    answer = ask(capsys, ADULT.replace("0.04", "2"), "--voters=1", "--queries=5")
    lead_turned = (2 + 2) / 4 * math.exp(-2)

    assert answer["method"] == "pld"
    assert answer["epsilon"] == pytest.approx(
        5 * math.log((1 - lead_turned) / lead_turned), abs=2e-3
    )
    assert "fewer than 50 parties" in answer["warnings"][0]


def test_votes_add_a_figure_that_is_not_publishable(capsys: Captured, tmp_path: Path) -> None:
    """Agreement makes the data-dependent figure small, but never the claim."""
    votes = np.tile([100, 0], (40, 1))
    loud = ADULT.replace("0.04", "0.3")
    answer = ask(capsys, loud, save(tmp_path / "v.npy", votes))

    assert answer["bounds"]["data-dependent"] == data_dependent_epsilon(votes, 0.3, delta=1e-5)
    assert answer["bounds"]["data-dependent"] < 0.01 < answer["epsilon"]
    assert answer["epsilon"] == ask(capsys, loud)["epsilon"]
    assert "do not publish" in answer["warnings"][-1]


def test_votes_of_gaussian_noise(capsys: Captured, tmp_path: Path) -> None:
    """The data-dependent cost of GNMax matches its reference value."""
    votes = np.tile([240, 5, 2, 1, 1, 1, 0, 0, 0, 0], (100, 1))
    command = "epsilon --mechanism gaussian --classes 10 --sigma 40 --splits 1 --queries 100"
    answer = ask(capsys, command, "--unit=party", save(tmp_path / "v.npy", votes))

    assert answer["bounds"]["data-dependent"] == pytest.approx(0.26169, abs=1e-4)


@pytest.mark.parametrize("lead", [2, 10, 30])
def test_votes_of_gumbel_noise_cover_the_exact_divergence(
    capsys: Captured, tmp_path: Path, lead: int
) -> None:
    """The figure is at least what the exact chances of the exponential mechanism give."""
    gamma, queries = 0.3, 50
    command = f"epsilon --mechanism gumbel --classes 2 --gamma {gamma} --splits 1"
    votes = np.tile([40 + lead, 40], (queries, 1))
    answer = ask(
        capsys, command, f"--queries={queries}", "--unit=party", save(tmp_path / "v.npy", votes)
    )
    orders = default_orders()[:1200]
    logs = []
    for moved in (-2, 2):
        own, other = (-np.logaddexp(0, [-gamma * x, gamma * x]) for x in (lead, lead + moved))
        powers = orders[:, None] * own + (1 - orders[:, None]) * other
        logs.append(np.logaddexp.reduce(powers, axis=1) / (orders - 1))
    exact = rdp_to_epsilon(orders, queries * np.maximum(*logs), 1e-5)

    assert 0 < exact <= answer["bounds"]["data-dependent"]


def test_votes_of_a_record_come_from_every_partition(capsys: Captured, tmp_path: Path) -> None:
    """At level L2 the file holds s rows a query, and sensitivity is one vote."""
    votes = np.tile([20, 0, 0], (30, 1))
    command = "epsilon --mechanism laplace --classes 3 --gamma 0.4 --splits 3 --queries 10"
    option = save(tmp_path / "v.npy", votes)
    answer = ask(capsys, command, "--unit=example", option)

    assert answer["bounds"]["data-dependent"] == data_dependent_epsilon(votes, 0.4, delta=1e-5)
    assert "(10, 3), got (30, 3)" in refuse(capsys, command, "--unit=party", option)


@pytest.mark.parametrize(
    ("votes", "sentence"),
    [
        (np.full((40, 2), -1), "votes must be finite and at least 0, got -1."),
        (np.full((40, 2), np.nan), "votes must be finite and at least 0, got nan."),
        (np.ones((39, 2)), "votes must be one row a release and one column a class, (40, 2)"),
        (np.ones((40, 3)), "got (40, 3)."),
        (np.ones(40), "got (40,)."),
        (np.full((40, 2), "many"), "votes must be an array of numbers"),
        (np.array([[{}, 1]] * 40, dtype=object), "votes must be a .npy file of numbers"),
    ],
)
def test_wrong_votes_are_refused(
    capsys: Captured, tmp_path: Path, votes: Any, sentence: str
) -> None:
    """Counts that cannot be counts are named; nothing in a file is ever executed."""
    np.save(tmp_path / "v.npy", votes, allow_pickle=True)

    assert sentence in refuse(capsys, ADULT, f"--votes={tmp_path / 'v.npy'}")


def test_a_file_that_is_no_array_is_refused(capsys: Captured, tmp_path: Path) -> None:
    """A missing file, another format and a header that lies are one sentence each."""
    text = tmp_path / "text.npy"
    text.write_text("3, 4, 5")
    with (tmp_path / "lie.npy").open("wb") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (10**13, 2)}
        np.lib.format.write_array_header_1_0(file, header)

    for path in (text, tmp_path / "lie.npy", tmp_path / "none.npy"):
        assert "votes must be a .npy file of numbers" in refuse(
            capsys, ADULT, f"--votes={path}"
        )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("--gamma 0.04", "--gamma 0"), "gamma must be greater than 0 and finite, got 0.0."),
        (("--gamma 0.04", "--gamma=-1"), "gamma must be greater than 0 and finite, got -1.0."),
        (("--gamma 0.04", "--gamma nan"), "gamma must be greater than 0 and finite, got nan."),
        (("--gamma 0.04", "--gamma much"), "argument --gamma: invalid float value: 'much'."),
        (("--gamma 0.04", ""), "gamma must be given for laplace noise, got None."),
        (("--gamma 0.04", "--sigma 3"), "sigma must be omitted for laplace noise, use gamma"),
        (("laplace", "gaussian"), "gamma must be omitted for gaussian noise, use sigma"),
        (("laplace", "cauchy"), "argument --mechanism: invalid choice: 'cauchy'"),
        (("1e-5", "0"), "delta must be greater than 0 and less than 1, got 0.0."),
        (("1e-5", "1"), "delta must be greater than 0 and less than 1, got 1.0."),
        (("classes 2", "classes 1"), "classes must be a whole number, at least 2, got 1."),
        (("splits 1", "splits 0"), "splits must be a whole number, at least 1, got 0."),
        (("queries 40", "queries 0"), "queries must be a whole number, at least 1, got 0."),
        (("queries 40", "queries 1.5"), "argument --queries: invalid int value: '1.5'."),
        (("--unit party", ""), "the following arguments are required: --unit."),
        (("party", "world"), "argument --unit: invalid choice: 'world'"),
        (("party", "party --voters 0"), "voters must be between 1 and 10000, got 0."),
        (("epsilon", "delta"), "argument COMMAND: invalid choice: 'delta'"),
    ],
)
def test_wrong_input_is_one_clear_sentence(
    capsys: Captured, change: tuple[str, str], sentence: str
) -> None:
    """Exit code 1, nothing on standard output, and one line that says what to change."""
    assert sentence in refuse(capsys, ADULT.replace(*change))


def test_no_noise_worth_the_name_is_no_promise(capsys: Captured) -> None:
    """JSON has no infinity: epsilon is null, and a warning says why."""
    answer = ask(capsys, ADULT.replace("0.04", "1e9"))

    assert (answer["epsilon"], answer["method"]) == (None, "none")
    assert answer["warnings"] == ["No finite epsilon holds at this delta."]


def test_large_figures_come_with_warnings(capsys: Captured) -> None:
    """An epsilon above ten, or a delta of one over the parties, is not left uncommented."""
    loud = ask(capsys, ADULT.replace("0.04", "0.35"))
    few = ask(capsys, ADULT.replace("laplace", "gumbel").replace("1e-5", "0.02"), "--voters=50")

    assert loud["warnings"] == ["An epsilon above 10 promises next to nothing."]
    assert few["warnings"] == ["delta must be well below 1 / 50, one over the units protected."]


@pytest.mark.parametrize(
    ("records", "samples", "epsilon", "delta"),
    [
        (2880, 18, 0.006249, 0.006232),
        (2880, 300, 0.104149, 0.098941),
        (300, 60, 0.199667, 0.181543),
    ],
)
def test_samples_with_replacement(
    capsys: Captured, records: int, samples: int, epsilon: float, delta: float
) -> None:
    """The theorem with the natural logarithm, and the exact statement beside it."""
    command = f"nfdp --records {records} --samples {samples} --with-replacement"
    answer = ask(capsys, command)

    assert answer["epsilon"] == pytest.approx(epsilon, abs=1e-6)
    assert answer["delta"] == pytest.approx(delta, abs=1e-6)
    assert answer["tight"] == {"epsilon": 0.0, "delta": answer["delta"]}
    assert f"publishing the {samples} drawn records" in answer["warning"]


def test_samples_without_replacement(capsys: Captured) -> None:
    """Each record is drawn with chance k / n, and a single draw needs no warning."""
    answer = ask(capsys, "nfdp --records 2880 --samples 300")

    assert answer["epsilon"] == pytest.approx(0.109961, abs=1e-6)
    assert answer["delta"] == answer["tight"]["delta"] == 300 / 2880
    assert "samples must be at most 5" in refuse(capsys, "nfdp --records 5 --samples 6")
    for more in ([], ["--with-replacement"]):
        assert "warning" not in ask(capsys, "nfdp --records 3 --samples 1", *more)


def test_dpsgd_matches_its_reference(capsys: Captured) -> None:
    """Twenty epochs at noise one cost 4.151."""
    pytest.importorskip("dp_accounting")
    command = "dpsgd --records 2880 --batch 64 --steps 900 --noise-multiplier 1 --delta 1e-5"
    answer = ask(capsys, command)

    assert answer.pop("epsilon") == pytest.approx(4.151097, abs=1e-5)
    assert answer == {
        "delta": 1e-5,
        "method": "pld",
        "unit": "example",
        "relation": "add-remove-one",
    }


def test_dpsgd_warns_and_refuses(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delta of one over the records is named, impossible batches are refused."""
    pytest.importorskip("dp_accounting")
    command = "dpsgd --records 50 --batch 10 --steps 3 --noise-multiplier 2"
    answer = ask(capsys, command, "--delta=0.02")

    assert answer["warnings"] == [
        "delta must be well below 1 / 50, one over the units protected."
    ]
    assert "must be at most 50, got 60" in refuse(capsys, command, "--batch=60")
    assert "noise_multiplier must be" in refuse(capsys, command, "--noise-multiplier=0")
    assert "delta must be greater than 0" in refuse(capsys, command, "--delta=2")
    monkeypatch.setitem(sys.modules, "dp_accounting.pld.privacy_loss_distribution", None)
    assert 'pip install "fl-strategies[accounting]"' in refuse(capsys, command, "--steps=4")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (ADULT, ["epsilon 0.934914 at delta 1e-05 by bounded-range", "one party", "scale 25"]),
        (
            ADULT.replace("party", "example"),
            ["one record of one party", "pld                  -"],
        ),
        (ADULT.replace("0.04", "0.35"), ["warning: An epsilon above 10"]),
        ("nfdp --records 9 --samples 3", ["tight: epsilon 0 at delta 0.333333", "warning: "]),
        (
            "dpsgd --records 99 --batch 9 --steps 3 --noise-multiplier 2",
            ["at delta 1e-05 by pld", "one record, blanked"],
        ),
    ],
)
def test_text_for_people(capsys: Captured, command: str, words: list[str]) -> None:
    """Without --json the same numbers come as a few lines of text."""
    code = main(command.split())

    text = capsys.readouterr().out
    assert code == 0
    assert len(text.splitlines()) < 15
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["epsilon", "nfdp", "dpsgd", "audit"]),
        (
            ["epsilon", "--help"],
            ["--mechanism {laplace,gumbel,gaussian}", "--votes FILE.npy", "never the claim"],
        ),
        (["audit", "--help"], ["--runs N", "default: 300000", "--json"]),
    ],
)
def test_help_explains_commands(
    capsys: Captured, arguments: list[str], words: list[str]
) -> None:
    """`--help` names every command and what its options mean."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)

    text = " ".join(capsys.readouterr().out.split())
    assert exit_info.value.code == 0
    assert [word for word in words if word not in text] == []


def test_the_audit_reports_every_mechanism(capsys: Captured) -> None:
    """A short audit with the secure source passes and lists its evidence."""
    answer = ask(capsys, "audit --runs 1000")

    assert answer["passed"] is True
    assert answer["runs"] == 1000
    assert len(answer["results"]) == 13
    assert set(answer["results"]["noisy-max-gumbel"]) == {
        "claimed_epsilon",
        "lower_bound",
        "p_value",
        "passed",
        "delta",
        "runs",
    }
    assert "runs must be a whole number, at least 1000" in refuse(capsys, "audit --runs 10")


def test_a_failed_audit_is_a_failed_command(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 and the word FAILED beside the mechanism that broke its promise."""
    votes = np.array([9, 0]), np.array([0, 9])
    shy = NoisyMax(noise="gumbel", scale=2, sensitivity=1, unit="party", num_classes=2)
    monkeypatch.setattr(audit_suite, "_suite", lambda: [("shy", shy, votes)])

    code = main(["audit", "--runs=1000"])

    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert [line.split()[-1] for line in lines[1:]] == ["FAILED", "passed", "passed", "passed"]


def test_an_installed_package_says_where_audits_run(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The attacks are with the tests, which no wheel contains."""
    monkeypatch.setattr(command, "__file__", str(tmp_path / "one" / "two" / "__main__.py"))

    assert "audit: the package must be that of a checkout" in refuse(capsys, "audit")


def test_it_runs_as_a_module() -> None:
    """`python -m fl_strategies.privacy` is the command line, with its exit code."""
    command = ["-m", "fl_strategies.privacy", "nfdp", "--records=2", "--samples=3"]
    root = Path(fl_strategies.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=root, check=False
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == "error: nfdp_theorem: samples must be at most 2, the records, got 3.\n"
    )


PLAN = "plan --target-epsilon 1 --parties 8 --records 2000 --classes 2 --public 4000"


def test_the_plan_of_a_small_federation(capsys: Captured) -> None:
    """Every strategy has noise, number, share, costs; the best is named."""
    answer = ask(capsys, PLAN)

    names = [one["strategy"] for one in answer["plans"]]
    assert answer["take"] == "fedregression L2"
    assert names[:3] == ["fedhistogram L2", "fedregression L2", "fedmoments L2"]
    for one in answer["plans"]:
        assert 0.5 < one["right"] < 1
        assert one["epsilon"] <= 1 < one["epsilon_ten_runs"]
        assert one["works"] or one["advice"]


def test_a_plan_without_hope_fails_and_says_what_would_work(capsys: Captured) -> None:
    """Scripts see an exit code; people see how many parties there would have to be."""
    code = main([*PLAN.split(), "--unit", "party", "--target-epsilon", "0.5"])
    captured = capsys.readouterr()

    assert code == 1
    assert "fedkt L1 cannot work" in captured.out
    assert "parties; or epsilon of at least" in captured.out


def test_margins_of_a_plan_are_the_users(capsys: Captured) -> None:
    """Larger leads keep more labels, and nonsense is one sentence."""
    near, far = (ask(capsys, PLAN, "--margins", text)["plans"] for text in ("0.1", "0.6,0.8"))

    assert all(one["right"] < other["right"] for one, other in zip(near, far, strict=True))
    assert "margins" in refuse(capsys, PLAN, "--margins", "-1,2")
    sentence = refuse(capsys, PLAN, "--margins", "wide")
    assert "--margins: must be numbers with commas, got 'wide'" in sentence


def test_the_documented_plan_is_what_the_command_prints(capsys: Captured) -> None:
    """The example of docs/planner.md is a real run, and stays one."""
    docs = Path(fl_strategies.__file__).parent.parent / "docs" / "planner.md"
    main(PLAN.split())

    assert f"```text\n{capsys.readouterr().out}```" in docs.read_text(encoding="utf-8")


def test_ten_runs_that_promise_nothing_are_told(capsys: Captured) -> None:
    """Scores at a large epsilon, ten times: no number in JSON, infinity in words."""
    command = PLAN.replace("--target-epsilon 1", "--target-epsilon 3")
    costs = {one["strategy"]: one["epsilon_ten_runs"] for one in ask(capsys, command)["plans"]}
    main(command.split())

    assert costs["fedkd noise"] is None
    assert costs["fedhistogram L2"] > 3
    assert " inf " in capsys.readouterr().out
