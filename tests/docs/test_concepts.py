"""docs/concepts/ is true: its Python prints what it shows, its defaults are the config's, its formulas can
be typeset."""

import dataclasses
import re
from pathlib import Path

import pytest

from proxima.config import PPOConfig
from proxima.runs.glossary import is_defined

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "docs" / "concepts").glob("*.md"))
PROSE = [*PAGES, *(ROOT / "docs" / name for name in ("troubleshooting.md", "reliability.md"))]
FIELDS = {field.name: field.default for field in dataclasses.fields(PPOConfig)}


def without_code(path: Path) -> str:
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_there_are_pages():
    assert [path.name[:2] for path in PAGES] == [f"{number}-" for number in range(1, 8)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_what_is_printed_is_what_the_page_shows(path, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = re.findall(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```",
        path.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    assert found
    for code, shown in found:
        exec(compile(code, path.name, "exec"), {})
        assert _alike(capsys.readouterr().out.strip(), shown.strip())


def _alike(printed: str, shown: str) -> bool:
    """Word for word; numbers may differ in the last digit, as other processors round."""
    number = r"-?\d+\.\d+"
    if re.sub(number, "#", printed) != re.sub(number, "#", shown):
        return False
    pairs = zip(re.findall(number, printed), re.findall(number, shown), strict=True)
    return all(
        abs(float(one) - float(other)) <= 1.01 * 10.0 ** -len(other.partition(".")[2]) for one, other in pairs
    )


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.stem)
def test_settings_exist_and_have_the_defaults_shown(path):
    """[`name`](.../name.md), where wanted a symbol, then the default as the first word in brackets."""
    text = " ".join(without_code(path).split())
    named = re.findall(
        r"\[`(\w+)`\]\((?:\.\./)?reference/settings/(\w+)\.md\)(?: \$[^$]+\$)?(?: \(([^);]+)[);])?", text
    )
    assert len(named) == text.count("reference/settings/")
    for shown, linked, given in named:
        assert shown == linked
        assert shown in FIELDS, f"{shown} is not a setting"
        if given:
            assert _is_default(given.split(",")[0].split(" ")[0].strip("`"), FIELDS[shown]), (
                f"{shown} ({given})"
            )


def _is_default(word: str, default: object) -> bool:
    names = {True: "on", False: "off", (): "none", "": "none"}
    if isinstance(default, bool | tuple) or default == "":
        return word == names[default]
    return word == default if isinstance(default, str) else float(word) == default


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_metrics_to_watch_exist(path):
    for line in re.findall(r"\*\*Watch:\*\*(.*?)\(\[", " ".join(without_code(path).split())):
        for name in re.findall(r"`([\w/]+)`", line):
            assert is_defined(name), f"{name} is not a metric"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_formulas_can_be_typeset(path):
    converter = pytest.importorskip("latex2mathml.converter")
    formulas = re.findall(r"\$\$(.+?)\$\$|\$([^$]+)\$", without_code(path), re.DOTALL)
    assert formulas
    for block, inline in formulas:
        assert converter.convert(block or inline).startswith("<math")


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.stem)
def test_files_and_tests_that_are_named_exist(path):
    text = without_code(path)
    for name in re.findall(r"`((?:src|tests)/[\w/.]+)", text):
        assert (ROOT / name).exists(), f"{name} does not exist"
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {test}"
    for link, place in re.findall(r"\]\(([\w./-]+\.md)#?([\w-]*)\)", text):
        if "reference/" in link:  # generated at the build
            continue
        assert (path.parent / link).exists(), f"{link} does not exist"
        titles = re.findall(r"^#+ (.+)$", (path.parent / link).read_text(encoding="utf-8"), re.MULTILINE)
        assert not place or place in {
            re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles
        }, f"{link}#{place}"
