"""Shared by the tests that run pages and examples."""

import pytest

from tests.docs.session import REAL, environment
from tests.forks import forked_programs, package_modules


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """`python` and `proxima`, forked from a process that has imported all of the package."""
    with forked_programs(package_modules(), environment(tmp_path_factory.mktemp("forks"), REAL)) as found:
        yield found
