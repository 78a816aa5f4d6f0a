import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The example does what its comments say."""
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    promised = re.findall(r"# ([\d.]+)$", example, flags=re.MULTILINE)

    exec(compile(example, "README.md", "exec"), {})  # noqa: S102 - our own text

    accuracy, sent = capsys.readouterr().out.split()
    assert [f"{float(accuracy):.2f}", sent] == promised


def test_the_two_commands_are_make_targets() -> None:
    """What the README says to type exists."""
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()

    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
