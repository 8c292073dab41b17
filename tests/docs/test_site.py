"""The site: it builds without a warning, links and anchors exist, it asks no other host for anything,
formulas are MathML."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests.docs.pages import PAGES, ROOT, name
from tools.mathml import to_mathml

LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
}
FORMULAS = r"""# Formulas

In a line $\hat{A}_t < \gamma^2$, in code `$x$`, as money $5 and $6.

$$
\min\left(r_t A_t, \text{clip}(r_t, 1 - \epsilon, 1 + \epsilon) A_t\right)
$$

```bash
echo $HOME $PATH
```
"""


def build(source, site):
    """mkdocs on `source`, which holds mkdocs.yml; what it printed."""
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=source,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout + run.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    code, said = build(ROOT, folder)
    assert code == 0, said
    assert all(line.startswith("INFO") for line in said.splitlines() if line.strip()), said
    return folder


@pytest.mark.docs
def test_every_page_is_there_and_code_has_a_copy_button(site):
    for page in PAGES[1:]:
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file()
    assert "content.code.copy" in (site / "index.html").read_text(encoding="utf-8")


class Loaded(HTMLParser):
    """What a browser fetches by itself when it opens a page."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev", "edit"):
            self.found.append(values.get("href", ""))
        elif tag in LOADS:
            self.found.append(values.get(LOADS[tag]) or "")


@pytest.mark.docs
def test_no_page_asks_another_host_for_anything(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) >= len(PAGES)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = Loaded(text).found
        assert any("bundle" in address for address in loaded)  # the theme's script: the scan sees something
        assert [address for address in loaded if re.match(r"(\w+:)?//", address)] == [], page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"""(url\(|@import)\s*["']?(https?:)?//""", sheet.read_text(encoding="utf-8")), (
            sheet.name
        )


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere_and_those_of_docs_stay_there(page):
    text = re.sub(
        r"^( *)(```|~~~).*?^ *\2", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for target in re.findall(r"\]\(([^)\s]+)", re.sub(r"`[^`\n]*`", "", text)):
        if not re.match(r"https?://|#|mailto:", target):
            there = (page.parent / target.partition("#")[0]).resolve()
            assert there.exists(), f"{name(page)}: {target} is not there"
            inside = page == ROOT / "README.md" or there.is_relative_to(ROOT / "docs")
            assert inside, f"{name(page)}: {target} leaves docs/; write the path in backticks"


@pytest.fixture
def source(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(FORMULAS, encoding="utf-8")
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text(settings.partition("\nnav:")[0], encoding="utf-8")
    return tmp_path


@pytest.mark.docs
def test_formulas_are_mathml_and_code_is_left_alone(source):
    code, said = build(source, source / "site")
    assert code == 0, said
    text = (source / "site" / "index.html").read_text(encoding="utf-8")
    assert (
        len(re.findall(r"<math[^>]*display=\"inline\"", text))
        == len(re.findall(r"<math[^>]*display=\"block\"", text))
        == 1
    )
    assert "$x$" in text
    assert "$5 and $6" in text
    assert "arithmatex" not in text
    assert "<script" in text
    assert "mathjax" not in text.lower()


@pytest.mark.docs
def test_broken_links_and_anchors_fail_the_build(source):
    broken = ["nowhere.md", "#nowhere", "../README.md", "/index.md"]
    (source / "docs" / "index.md").write_text(
        "# Page\n\n" + "\n".join(f"[there]({link})" for link in broken), encoding="utf-8"
    )
    code, said = build(source, source / "site")
    assert code != 0
    assert [link for link in broken if not re.search(rf"^WARNING.*'{link}'", said, re.MULTILINE)] == []


@pytest.mark.docs
def test_a_broken_formula_fails_the_build_and_is_named_with_its_page(source):
    (source / "docs" / "index.md").write_text(r"# Page $\undefinedthing{x}$", encoding="utf-8")
    code, said = build(source, source / "site")
    assert code != 0
    assert r"index.md: the formula '\\undefinedthing{x}' has \undefinedthing" in said


@pytest.mark.parametrize("latex", [r"\frac{a}", r"\nosuch{a}", r"\left( a", "a_"])
def test_a_formula_that_would_be_drawn_wrong_is_refused(latex):
    with pytest.raises(ValueError, match="the formula"):
        to_mathml(latex, True)
