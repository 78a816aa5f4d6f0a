import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from simulations import commands
from simulations.__main__ import main
from simulations.commands import COMMANDS
from simulations.config import describe

ROOT = Path(__file__).parents[2]
FAST = [
    "--set=num-parties=3",
    "--set=num-trees=5",
    "--set=num-workers=1",
    "--learner=random-forest,logistic-regression",
]


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """Return the help of a command."""
    with pytest.raises(SystemExit) as exit_info:
        main([*command, "--help"])
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a summary there and a help of its own."""
    listed = help_of(capsys)
    assert {*COMMANDS} > {"run", "flower", "repeat", "compare", "curve", "report", "deploy"}
    for name, (_, summary) in COMMANDS.items():
        assert f" {name} " in listed
        assert " ".join(summary.split()[:3]) in " ".join(listed.split())
        assert f"usage: fl-strategies {'privacy ' * (name == 'plan')}{name}" in help_of(
            capsys, name
        )


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """`run --help` lists all settings with their defaults."""
    text = help_of(capsys, "run")
    for key, default, meaning in describe():
        assert f"{key:28} {meaning} ({default!r})" in text


def test_help_loads_no_part_of_the_package() -> None:
    """A list of commands takes no seconds; costs of privacy need no simulation."""
    show = """
import sys
from simulations.commands import main
try: main(["--help"])
except SystemExit: pass
heavy = {"flwr", "numpy", "fl_strategies", "clients"} & {*sys.modules}
main(["privacy", "nfdp", "--records=9", "--samples=2"])
heavy |= {"pandas", "matplotlib", "simulations.config", "sklearn", "clients"} & {*sys.modules}
sys.exit(str(heavy) if heavy else 0)
"""

    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert "compare" in done.stdout
    assert "tight: epsilon 0" in done.stdout


def test_the_console_script_and_its_aliases_are_one_program() -> None:
    """`python -m simulations` and `python -m simulations.deploy` stay."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["fl-strategies"].partition(":")
    assert getattr(importlib.import_module(module), name) is main
    for alias, command in (("simulations", []), ("simulations.deploy", ["deploy"])):
        done = subprocess.run(
            [sys.executable, "-m", alias, "--help"], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0
        assert done.stdout.startswith(" ".join(["usage: fl-strategies", *command, "[-h]"]))


def test_a_run_prints_a_table_and_writes_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table goes to standard output, the same as JSON to two files."""
    code = main(
        ["run", *FAST, f"--set=output-dir={tmp_path}/runs", "--json", f"{tmp_path}/o.json"]
    )

    text = capsys.readouterr().out
    report = json.loads((tmp_path / "o.json").read_text())
    (kept,) = (tmp_path / "runs").glob("*/result.json")
    assert code == 0
    assert "fedkd on digits, seed 0, final extra-trees" in text
    assert json.loads(kept.read_text()) == report
    assert report["cpu-seconds"] > 0


def test_two_runs_of_one_seed_are_equal(tmp_path: Path) -> None:
    """Accuracy and bytes repeat exactly, with one worker and with two."""
    outcomes = []
    for workers in (1, 2):
        target = tmp_path / f"{workers}.json"
        options = [*FAST, f"--set=output-dir={tmp_path}", f"--set=num-workers={workers}"]
        main(["run", *options, "--seed=3", "--json", str(target)])
        report = json.loads(target.read_text())
        outcomes.append([report[k] for k in ("accuracy", "solo-accuracy", "num-bytes-sent")])

    assert outcomes[0] == outcomes[1]


def test_averaging_takes_as_many_rounds_as_it_is_given(tmp_path: Path) -> None:
    """FedAvg runs from the command line, and its last round is better than its first."""
    target = tmp_path / "averaged.json"
    options = [
        "--strategy=fedavg",
        "--learner=mlp",
        "--set=final-learner=mlp",
        "--set=solo=false",
        "--set=num-parties=3",
        "--set=num-server-rounds=3",
        "--set=local-epochs=4",
        "--set=pooled=false",
        "--set=num-workers=1",
        f"--set=output-dir={tmp_path}",
    ]

    assert main(["run", *options, "--json", str(target)]) == 0

    report = json.loads(target.read_text())
    figures = [one["evaluate"]["accuracy"] for one in report["rounds"]]
    assert len(figures) == 3
    assert figures[-1] == pytest.approx(report["accuracy"])
    assert figures[-1] > figures[0] + 0.1
    assert report["rejected"] == {}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--set=beta=-1"], "Settings: beta must be greater than 0, got -1.0."),
        (["--set=beta=much"], "Settings: beta must be a number, got 'much'."),
        (["--set=betta=1"], "Did you mean 'beta'?"),
        (["--learner=oracle"], "Settings: learner must be one of random-forest"),
        (["--data=mars"], "Settings: data must be one of digits"),
        (["--data=missing.csv"], "data must be a file that exists, got 'missing.csv'."),
        (["--strategy=fedmagic"], "Settings: strategy must be one of akd, "),
        (
            ["--preset=paper"],
            "preset: data must be one of adult, cod-rna, mnist, got 'digits'.",
        ),
        (
            ["--strategy=akd", "--learner=svm"],
            "xgboost, xgboost-scores, forest-scores, ridge, moments, random-features, mlp",
        ),
        (
            ["--strategy=fedavg", "--learner=mlp", "--set=final-learner=random-forest"],
            "Settings: final-learner must be one of mlp",
        ),
        (["--learner=resnet8"], "resnet8: a row must be an image"),
        (["--learner=embedding-bag"], "Settings: learner must be a model of numbers"),
        (
            ["--strategy=fedavg", "--learner=mlp", "--set=final-learner=mnist-mlp"],
            "Settings: learner must be the final-learner for fedavg, got 'mlp'.",
        ),
        (
            ["--set=release=nfdp", "--set=num-samples=9"],
            "key must be a setting of fedkd, got 'release', which cronus, fedmd have.",
        ),
        (
            [
                "--strategy=fedmd",
                "--set=release=nfdp",
                "--set=num-samples=900",
                "--set=with-replacement=false",
            ],
            "Settings: num-samples must be at most",
        ),
        (["--set=num-parties=500"], "num-parties x min-records must be at most"),
        (["--seed=-1"], "Settings: seed must be at least 0, got -1."),
    ],
)
def test_wrong_input_is_one_clear_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and one line that says what to change."""
    code = main(["run", *arguments])

    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 1
    assert error.startswith("error: ")
    assert sentence in error


def test_a_file_with_gaps_and_ids_is_told_and_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was understood comes before the training, and --drop leaves a column out."""
    path = tmp_path / "holes.csv"
    path.write_text("id,a,b,c,label\n" + "".join(_ugly_row(row) for row in range(240)))
    options = [*FAST, f"--set=output-dir={tmp_path}", "--label=label", "--drop=c"]

    code = main(["run", "--data", str(path), *options])

    told = capsys.readouterr()
    assert code == 0
    assert "numbers (2): a, b (missing ones marked)" in told.err
    assert "dropped (2): id (an id), c (asked for)" in told.err
    assert "classes: x 50.0 %, y 50.0 %" in told.err
    assert f"fedkd on {path}" in told.out


def _ugly_row(row: int) -> str:
    return f"{row},{row % 7},{row % 5 or ''},z{row % 4},{'xy'[row % 2]}\n"


@pytest.mark.parametrize("command", ["run", "repeat", "compare", "curve"])
def test_results_that_cannot_be_written_are_found_before_training(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sentence that says what to do, and nothing was trained."""
    monkeypatch.setattr(
        "simulations.runtime.local.run_local", lambda *_, **__: pytest.fail("trained")
    )
    file = tmp_path / "file"
    file.touch()

    assert main([command, "--json", str(file / "out.json")]) == 1
    told = capsys.readouterr().err
    assert f"{command}: the folder of --json must be writable" in told
    assert "Name another file: --json OUT." in told
    assert main([command, "--json", str(tmp_path)]) == 1
    assert f"{command}: --json must be a file, got the folder" in capsys.readouterr().err
    if command == "run":
        assert main([command, f"--set=output-dir={file}"]) == 1
        told = capsys.readouterr().err
        assert "output-dir must be writable" in told
        assert "Name another one: --set output-dir=FOLDER." in told


def test_a_missing_label_names_the_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forgetting --label shows what there is to choose from."""
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,x\n")

    assert main(["run", "--data", str(path)]) == 1
    told = capsys.readouterr().err
    assert "label must be given (--label COLUMN on the command line)" in told
    assert "The columns are a, b." in told


def test_a_preset_can_be_overridden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--set` wins over the preset, and repeat compares with the published figures."""
    rng = np.random.default_rng(0)
    x = (rng.random((400, 123)) < 0.1).astype(np.uint8)
    y = (x[:, :20].sum(axis=1) > 2).astype(np.int64)
    np.savez(tmp_path / "a9a.npz", x_train=x, y_train=y)
    monkeypatch.setenv("FL_STRATEGIES_DATA", str(tmp_path))
    target = tmp_path / "both.json"
    small = ["--set=num-parties=3", "--set=num-trees=3", "--set=num-workers=1"]

    paper = ["--data=adult", "--preset=paper", "--seeds=0,1"]

    code = main(["repeat", *paper, *small, "--json", str(target)])

    runs = json.loads(target.read_text())["runs"]
    text = capsys.readouterr().out
    assert code == 0
    assert [run["seed"] for run in runs] == [0, 1]
    assert runs[0]["settings"]["teacher"] == "decision-tree"
    assert runs[0]["settings"]["num-parties"] == 3
    assert "82.2 %" in text


def test_repeating_without_a_preset_has_no_published_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Means and deviations stand alone for one's own federation."""
    assert main(["repeat", *FAST, "--seeds=0", "--set=pooled=false"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["mean", "deviation", "published"]
    assert all(line.endswith("-") for line in lines[1:])


def test_tables_of_papers_keep_their_old_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says where it has moved; an installed package, which lacks them, says so too."""
    assert main(["tables", "--results", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "fedmd_letters" in shown.out
    assert "this command is now python -m reproduction tables" in shown.err

    monkeypatch.setattr(
        commands, "__file__", str(tmp_path / "simulations" / "commands" / "x.py")
    )
    assert main(["table", "fedmd_letters"]) == 1
    assert "table must be run from a checkout" in capsys.readouterr().err
