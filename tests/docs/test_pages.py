"""Every page runs: its blocks, in order, in an empty folder (`make test-docs`)."""

import pytest

from tests.docs.pages import PAGES, name
from tests.docs.session import run_page

WITH_BLOCKS = [
    page for page in PAGES if any(fence in page.read_text(encoding="utf-8") for fence in ("```", "~~~"))
]


@pytest.mark.docs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name)
def test_the_page_runs(page, tmp_path):
    folder = tmp_path / "page"
    folder.mkdir()
    run_page(page, folder)
