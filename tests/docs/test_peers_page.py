"""docs/peers.md: what it says of this repository is there, and its two tables agree."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
NAMED = sorted(
    set(re.findall(r"`((?:src|tests|docs|examples)/[^`\s]*)`", PAGE))
)  # a peer's path begins with its project
ANSWERS = {"yes", "no", "no*", "partial", "-"}


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The rows of a section's table, without its head and without rows that are a heading."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")][2:]
    return [
        cells
        for line in lines
        if "**" not in line
        for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    ]


def evidence() -> dict[str, str]:
    return dict(
        re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", section("Evidence, by row"), re.DOTALL | re.MULTILINE)
    )


@pytest.mark.parametrize("named", NAMED)
def test_what_it_names_here_exists(named):
    path, _, function = named.partition("::")
    assert (ROOT / path).exists()
    if function:
        assert re.search(rf"^def {function}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_row_has_its_evidence_and_every_yes_of_ours_names_a_file():
    table, found = rows("The table"), evidence()
    assert [row[0] for row in table] == [str(number) for number in range(1, len(table) + 1)] == list(found)
    for number, _, ours, *theirs in table:
        assert {ours, *theirs} <= ANSWERS
        if ours in ("yes", "partial"):
            assert re.match(r"Here:\s+`(src|tests|docs)/", found[number]), number


def test_the_second_table_has_its_evidence_too():
    table = rows("Five more projects")
    found = dict(
        re.findall(
            r"^- ([A-Z])\. (.*?)(?=^- [A-Z]\. |\Z)", section("Five more projects"), re.DOTALL | re.MULTILINE
        )
    )
    assert [row[0] for row in table] == list(found)
    for letter, _, ours, *theirs in table:
        assert len(theirs) == 5
        assert {ours, *theirs} <= ANSWERS
        assert re.match(r"Here:\s", found[letter]) or ours == "no"


def test_where_another_project_is_better_the_page_says_what_to_do():
    told = {row for cells in rows("What the others do better") for row in cells[0].split(", ")}
    behind = {
        row[0]
        for row in rows("The table") + rows("Five more projects")
        if row[2] in ("no", "partial") and "yes" in row[3:]
    }
    assert behind <= told, behind - told


def test_the_two_tables_agree_where_they_ask_the_same():
    first = {row[1]: row[2] for row in rows("The table")}
    same = [row for row in rows("Five more projects") if row[1] in first]
    assert len(same) >= 8
    assert all(row[2] == first[row[1]] for row in same)


def test_the_short_table_is_a_part_of_the_long_one():
    long = {row[1]: row[2:] for row in rows("The table")}
    short = rows("In short")
    assert 15 <= len(short) <= 18
    for feature, *answers in short:
        assert answers == long[feature], feature


def test_every_defect_names_its_test():
    text = section("Defects that are regression tests here")
    defects = re.findall(r"^\d+\. \*\*(.*?)(?=^\d+\. |\Z)", text, re.DOTALL | re.MULTILINE)
    assert len(defects) == 8
    assert all("`tests/" in defect for defect in defects)
