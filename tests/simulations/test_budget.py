"""Parties that keep their own ledgers, over several runs of one federation."""

import json
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from clients.app import NO_BUDGET
from simulations.__main__ import main
from simulations.config import Settings
from simulations.runtime.client_app import load_party

FAST = [
    *("--strategy=fedkt", "--learner=random-forest", "--set=teacher=decision-tree"),
    *("--set=num-parties=3", "--set=num-trees=5", "--set=num-workers=1"),
    *("--set=solo=false", "--set=pooled=false"),
    *("--set=privacy-level=L2", "--set=num-queries=20", "--set=gamma=0.2"),
]


def run(tmp_path: Path, *options: str) -> dict[str, Any] | None:
    target = tmp_path / "out.json"
    target.unlink(missing_ok=True)
    main(["run", *FAST, f"--set=output-dir={tmp_path}", "--json", str(target), *options])
    return json.loads(target.read_text()) if target.exists() else None


def test_a_second_run_on_the_same_data_composes_with_the_first(tmp_path: Path) -> None:
    """Epsilon of the party grows over runs, though each run by itself costs the same."""
    state = f"--set=state-dir={tmp_path}/state"

    first = run(tmp_path, state)
    second = run(tmp_path, state, "--set=final-learner=extra-trees")

    assert first is not None
    assert second is not None
    assert second["epsilon-example"] > 1.3 * first["epsilon-example"]
    assert second["metrics"]["train"]["num-releases"] == 2 * 3 * 20


def test_a_party_refuses_what_would_exceed_its_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run finds no party willing, and says why in one sentence."""
    options = [f"--set=state-dir={tmp_path}/state", "--set=max-epsilon=6"]

    first = run(tmp_path, *options)
    refused = run(tmp_path, *options)

    assert first is not None
    assert first["epsilon-example"] < 6
    assert refused is None
    assert NO_BUDGET.rstrip(".") in capsys.readouterr().err


def test_a_budget_needs_noise_and_a_place_to_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without noise nothing leaves such a party; a limit that is forgotten would be none."""
    limit = "--set=max-epsilon=6"
    kept = [f"--set=state-dir={tmp_path}/state", limit]

    assert run(tmp_path, *kept, "--set=privacy-level=L0", "--set=gamma=0") is None
    assert "leave the party without noise" in capsys.readouterr().err
    assert run(tmp_path, limit) is None
    assert "state-dir must be given with max-epsilon" in capsys.readouterr().err


def test_a_nodes_own_budget_wins_over_the_runs(tmp_path: Path) -> None:
    """A server cannot raise the limit that a party set for itself."""
    settings = Settings.of(
        strategy="fedkt",
        num_parties=3,
        state_dir=str(tmp_path),
        max_epsilon=100.0,
        privacy_level="L2",
        gamma=1.0,
    )
    context = Context(
        run_id=5,
        node_id=1,
        node_config={"partition-id": 0, "max-epsilon": 2.0, "state-dir": str(tmp_path / "own")},
        state=RecordDict(),
        run_config=settings.to_run_config(),
    )

    party = load_party(context)

    assert party.journal is not None
    assert party.journal.ledger().max_epsilon == 2.0
    assert party.journal.folder == tmp_path / "own" / "party-0"
    assert party.run == "5"
