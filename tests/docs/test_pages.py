"""Every page runs: its blocks, in order, in an empty folder (`make test-docs`)."""

import pytest

from tests.docs.pages import PAGES, name
from tests.docs.session import REAL, run_page

WITH_BLOCKS = [
    page for page in PAGES if any(fence in page.read_text(encoding="utf-8") for fence in ("```", "~~~"))
]


STARTED = {"docs/index.md", "docs/resume.md"}
"""Run by the real programs: one, that they are run at all; the other, which kills by process number."""

WHOLE = {"docs/doctor.md"}
"""Run on all of the sampled files: what it prints depends on learning. `make demo` has the whole data too."""


@pytest.mark.docs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name)
def test_the_page_runs(page, tmp_path, request):
    folder = tmp_path / "page"
    folder.mkdir()
    programs = REAL if name(page) in STARTED else request.getfixturevalue("programs")
    run_page(page, folder, programs=programs, small=name(page) not in WHOLE)
