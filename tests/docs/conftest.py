"""Shared by the tests that run pages and examples."""

import pkgutil

import pytest

import proxima
from tests.docs.forks import forked_programs
from tests.docs.session import REAL, environment

LOADED_WHEN_USED = ["transformers.models.qwen3.modeling_qwen3", "fastapi", "uvicorn"]


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """`python` and `proxima`, forked from a process that has imported all of the package."""
    package = [module.name for module in pkgutil.walk_packages(proxima.__path__, "proxima.")]
    modules = [name for name in package if ".kernels." not in name and not name.endswith(".__main__")]
    folder = tmp_path_factory.mktemp("forks")
    with forked_programs([*modules, *LOADED_WHEN_USED], environment(folder, REAL)) as found:
        yield found
