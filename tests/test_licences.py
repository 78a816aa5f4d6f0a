"""Whoever installs this package can read whose code comes along."""

import pytest

from tests.licences import LEFT_OUT, PAGE, direct_dependencies, licence_of

ROWS = {
    cells[1].strip(): cells[3].strip()
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("|") and (cells := line.split("|"))
}


def test_every_direct_dependency_is_listed_with_its_licence() -> None:
    """A new dependency is not added without a look at its licence."""
    packages = direct_dependencies()

    assert {"flwr", "numpy", "scipy", "torch"} <= set(packages)
    assert set(ROWS) - {"package", "---"} == set(packages)
    for package in packages:
        found = LEFT_OUT.get(package) or licence_of(package)
        assert ROWS[package] == found != "", package


@pytest.mark.trackers
@pytest.mark.parametrize("package", LEFT_OUT)
def test_packages_that_are_usually_left_out_say_the_same(package: str) -> None:
    """Where they are installed, their own metadata has the licence that is listed."""
    assert LEFT_OUT[package] == licence_of(package)
