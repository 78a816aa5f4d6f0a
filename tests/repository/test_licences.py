"""Whoever installs this package can read whose code comes along."""

from tests.licences import direct_dependencies, is_installed, licence_of, listed_licences


def test_every_direct_dependency_is_listed_with_its_licence() -> None:
    """A new dependency is not added without a look at its licence."""
    packages, listed = direct_dependencies(), listed_licences()
    installed = [package for package in packages if is_installed(package)]

    assert {"flwr", "numpy", "scipy", "torch"} <= set(installed)
    assert set(listed) == set(packages)
    assert all(listed.values())
    for package in installed:
        assert listed[package] == licence_of(package), package
