"""What a new strategy costs its author: one class for each side and one line of registry."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding_a_strategy.md"
PROX = """
from flwr.serverapp.strategy import FedProx

# FedProx without a line of server code: Flower's own class does it all.
REGISTRY["my-prox"] = Algorithm(flower_strategy(FedProx, "my-prox"), WeightsParty())
"""
ARGUMENTS = ["-q", "-p", "no:cacheprovider", "-p", "trimmed", "tests/contract"]


def test_the_strategy_of_the_page_keeps_the_whole_contract(tmp_path: Path) -> None:
    """The suite over the registry runs it end to end, without a word about it."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)
    (tmp_path / "trimmed.py").write_text(source + PROX, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    done = subprocess.run(
        [sys.executable, "-m", "pytest", *ARGUMENTS, "-k", "trimmed-logits or my-prox"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-2000:]
    assert "failed" not in done.stdout
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) > 60
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    assert sum(code_lines(ast.unparse(each)) for each in classes) <= 60


def code_lines(source: str) -> int:
    lines = [line.strip() for line in source.splitlines()]
    return sum(bool(line) and not line.startswith('"""') for line in lines)
