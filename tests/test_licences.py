"""Whoever installs this package can read whose code comes along."""

from tests.licences import PAGE, direct_dependencies, licence_of

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
        assert ROWS[package] == licence_of(package) != "", package
