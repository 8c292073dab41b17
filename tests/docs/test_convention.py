"""Every block of every page is run, parsed, shown or says why not; commands that are not run are
understood all the same."""

import re
import shutil

import pytest

from proxima.cli import parse
from proxima.world.sample_files import write_samples
from tests.docs.blocks import proxima_commands, read_blocks
from tests.docs.pages import PAGES, name


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    write_samples(folder)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_keep_the_convention_and_commands_that_are_not_run_parse(page, tmp_path, monkeypatch, sample):
    monkeypatch.chdir(tmp_path)
    for block in read_blocks(page):
        if block.title:
            path = tmp_path / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "bash":
            for folder in re.findall(r"proxima data sample ([\w./-]+)", block.text):
                shutil.copytree(sample, tmp_path / folder, dirs_exist_ok=True)
            if block.not_run:
                understand(block)


def understand(block):
    for command in proxima_commands(block.text):
        words = [word for word in command if word != "--debug"]
        try:
            parse(words)
        except ValueError as error:
            raise AssertionError(f"{block.place}: `proxima {' '.join(words)}`: {error}") from None
        except SystemExit as stop:  # tyro has printed what is wrong; --help ends with 0
            if stop.code:
                raise AssertionError(
                    f"{block.place}: `proxima {' '.join(words)}` is not understood"
                ) from None
