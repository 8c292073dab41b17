"""Every example of docs/contributing.md is made in a copy of the package and does what the page shows.

A `diff` block names its file in the first line, `+++ FILE` or `+++ FILE (new)`; `@@` starts another place in the
same file. Lines that are there already must stand there exactly once. A `text` block shows `$ commands` with
lines that they print, `...` standing for others, or a `>>>` session as `doctest` reads it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import read_blocks
from tests.forks import forked_programs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contributing.md"
MOST_FILES = 2  # source files that a change may touch
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
LIBRARIES = ["torch", "peft", "transformers.models.qwen3.modeling_qwen3", "gguf"]
DOCTEST = (
    "import doctest, sys; flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE; "
    "sys.exit(doctest.testfile(sys.argv[1], module_relative=False, optionflags=flags).failed)"
)


def examples():
    """Title of a section -> its blocks."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    titles = [(number, line[3:]) for number, line in enumerate(lines, 1) if line.startswith("## ")]
    found = {title: [] for _, title in titles}
    for block in read_blocks(PAGE):
        found[[title for number, title in titles if number < block.line][-1]].append(block)
    return found


EXAMPLES = examples()


def edits(text):
    """The file of a `diff` block, whether it is new, and for each place the lines before and after."""
    head, *lines = text.splitlines()
    name, new = re.fullmatch(r"\+\+\+ (\S+)( \(new\))?", head).groups()
    places = [([], [])]
    for line in lines:
        if line == "@@":
            places.append(([], []))
            continue
        sign, rest = line[:1] or " ", line[1:]
        assert sign in " +-", f"{name}: {line!r} begins with neither a space, + nor -"
        if sign in " -":
            places[-1][0].append(rest)
        if sign in " +":
            places[-1][1].append(rest)
    return name, bool(new), places


def apply(text, root):
    """Make the edit of a `diff` block; returns the file."""
    name, new, places = edits(text)
    path = root / name
    assert path.exists() != new, f"{name} is {'there already' if new else 'not there'}"
    content = "\n" if new else "\n" + path.read_text(encoding="utf-8")
    for before, after in places:
        old = "".join(f"{line}\n" for line in before)
        found = content.count("\n" + old)
        assert new or found == 1, f"{name}: these lines stand there {found} times, not once:\n{old}"
        content = content.replace("\n" + old, "\n" + "".join(f"{line}\n" for line in after), 1)
    path.write_text(content[1:], encoding="utf-8")
    return path


def run(command, folder, root):
    """What a command prints, where `proxima` and `python` are those of the copy."""
    environment = ENVIRONMENT | {"PATH": f"{root}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shown(text, folder, root):
    """Run what a `text` block shows, and compare."""
    if ">>>" in text:
        (folder / "session.txt").write_text(text, encoding="utf-8")
        run(["python", DOCTEST, "session.txt"], folder, root)
        return
    for session in text.replace("\\\n", " ").split("$ ")[1:]:
        command, *lines = session.splitlines()
        printed = [" ".join(line.split()) for line in run(["bash", "-c", command], folder, root).splitlines()]
        for line in lines:
            wanted = " ".join(line.split())
            assert wanted in ("...", *printed), f"{command}\ndid not print {wanted!r} but\n" + "\n".join(
                printed
            )


@pytest.fixture(scope="session")
def libraries():
    """`python` with all that the package imports, but not the package."""
    with forked_programs(LIBRARIES, ENVIRONMENT) as programs:
        yield programs / "python"


@pytest.fixture
def copy(tmp_path):
    """A copy of the package, compiled as far as it was."""
    root = tmp_path / "copy"
    shutil.copytree(ROOT / "src" / "proxima", root / "src" / "proxima")
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


@pytest.fixture
def commands(copy, libraries):
    """`proxima`, and `python CODE`, of the copy."""
    first = f"import sys; sys.path.insert(0, {str(copy / 'src')!r}); "
    main = f"{first}from proxima.cli import main; sys.exit(main())"
    lines = {
        "proxima": f'exec {libraries} -c "{main}" "$@"',
        "python": f'code=$1; shift; exec {libraries} -c "{first}$code" "$@"',
    }
    for name, line in lines.items():
        (copy / name).write_text(f"#!/bin/sh\n{line}\n")
        (copy / name).chmod(0o755)


def test_the_page_has_an_example_of_every_kind_of_change():
    assert list(EXAMPLES) == [
        "A metric",
        "A setting",
        "A buffer strategy",
        "A ready-made reward",
        "A kind of reward",
        "An advantage estimator",
        "A family of the fast engine",
        "A command",
        "A doctor check",
    ]


def make(title, root):
    """The files of an example, edited."""
    return [apply(block.text, root) for block in EXAMPLES[title] if block.language == "diff"]


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_touches_few_files_and_keeps_the_style(title, copy):
    files = make(title, copy)
    assert 1 <= len(set(files)) <= MOST_FILES
    for check in (["format", "--check", "-q"], ["check", "-q"]):
        run([sys.executable, "-m", "ruff", *check, *files], copy, copy)


@pytest.mark.docs
@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_does_what_it_shows(title, copy, commands, tmp_path):
    make(title, copy)
    sessions = [block.text for block in EXAMPLES[title] if block.language == "text"]
    assert sessions
    for text in sessions:
        shown(text, tmp_path, copy)


def test_an_edit_that_does_not_fit_is_found(copy):
    with pytest.raises(AssertionError, match="stand there 0 times"):
        apply("+++ src/proxima/cli/commands.py\n     'no such': Line,\n+    more\n", copy)
    with pytest.raises(AssertionError, match="there already"):
        apply("+++ src/proxima/cli/commands.py (new)\n+more\n", copy)
    with pytest.raises(AssertionError, match="not there"):
        apply("+++ src/proxima/cli/no_such.py\n+more\n", copy)


@pytest.mark.docs
def test_output_that_is_not_printed_is_found(copy, commands, tmp_path):
    with pytest.raises(AssertionError, match="did not print"):
        shown("$ echo one\ntwo\n", tmp_path, copy)
    with pytest.raises(AssertionError, match="Expected"):
        shown(">>> 1 + 1\n3\n", tmp_path, copy)
