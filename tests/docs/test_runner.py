"""The runner of pages: what it finds in a page, what it runs, and that each kind of fault fails the page."""

import re
import textwrap

import pytest

from proxima.cli import parse
from tests.docs.blocks import proxima_commands, read_blocks
from tests.docs.session import run_page

SERVER = """
```python title="server.py"
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(CODE)
        self.end_headers()
with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
    print(f"open http://127.0.0.1:{server.server_port}/?token=x", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("stopped")
```
<!-- server -->
```bash
python server.py
```
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        page = tmp_path / "page.md"
        page.write_text(textwrap.dedent(text), encoding="utf-8")
        return page

    return write


@pytest.fixture
def run(write, tmp_path):
    def run(text, **options):
        folder = tmp_path / "folder"
        folder.mkdir()
        run_page(write(text), folder, **options)
        return folder

    return run


# --- finding blocks ---


def test_blocks_in_lists_with_titles_tildes_and_longer_fences_are_found(write):
    page = write("""
        1. first
            ```bash
            echo one \\
                two
            ```
        ~~~python title="a/b.py"
        text = '''
        ```
        '''
        ~~~
        ````text
        ```
        ````
        <!-- not run: needs a GPU -->
        ```bash
        proxima demo
        ```
        """)
    found = [
        (block.line, block.language, block.title, block.text, block.not_run) for block in read_blocks(page)
    ]
    assert found == [
        (3, "bash", "", "echo one \\\n    two\n", ""),
        (7, "python", "a/b.py", "text = '''\n```\n'''\n", ""),
        (12, "text", "", "```\n", ""),
        (16, "bash", "", "proxima demo\n", "needs a GPU"),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```\nx\n```", "page.md, line 1: a block without a language; write ```bash"),
        ("\n```sh\nls\n```", "page.md, line 2: a block of 'sh'; write ```bash"),
        ("```console\n$ ls\n```", "a block of 'console'"),
        ("```{.python}\nx\n```", "a block of '{.python}'"),
        ("<!-- not run: -->\n```bash\nls\n```", "line 1: say why"),
        ("<!-- not run -->\n```bash\nls\n```", "line 1: say why"),
        ("<!-- not-run: slow -->\n```bash\nls\n```", "is not a mark"),
        ("<!-- Server -->\n```bash\nls\n```", "is not a mark"),
        ("<!-- not run: slow -->\n\n```bash\nls\n```", "take out the empty line"),
        ("<!-- not run: slow -->\n```text\nls\n```", "take out its mark"),
        ("<!-- server -->\n```python\nx\n```", "only a bash block"),
        ("```bash\nls\n", "never closed"),
        ("> ```bash\n> ls\n> ```", "inside a quote"),
        ('```text title="../x"\nx\n```', "stay in the page's folder"),
        ('```text title="/x"\nx\n```', "stay in the page's folder"),
        ("```yaml\na: [\n```", "not yaml"),
        ('```json\n{"a": ...}\n```', "not json"),
        ('```jsonl\n{"a": 1}\n{\n```', "not jsonl"),
        ("<!-- not run: needs a GPU -->\n```python\ndef\n```", "not Python"),
    ],
)
def test_a_block_that_breaks_the_convention_is_named_with_a_remedy(write, text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        read_blocks(write(text))


def test_commands_are_found_behind_variables_torchrun_and_in_several_lines():
    script = """
A=1 proxima train --data a.txt \\
    --rewards 'regex,pattern=[.!?]$'   # a remark
torchrun --nproc_per_node=2 -m proxima train --data b.txt --rewards length_band,low=1,high=2 > log
cd proxima && proxima report runs/a | head; pip install proxima
! proxima demo --steps 1 &
"""
    assert list(proxima_commands(script)) == [
        ["train", "--data", "a.txt", "--rewards", "regex,pattern=[.!?]$"],
        ["train", "--data", "b.txt", "--rewards", "length_band,low=1,high=2"],
        ["report", "runs/a"],
        ["demo", "--steps", "1"],
    ]
    with pytest.raises(ValueError, match="unknown command"):
        parse(["fly"])


# --- running them ---


def test_a_page_runs_in_order_in_its_folder_with_one_namespace(run):
    folder = run("""
        ```python title="mine.py"
        word = "written"
        ```
        ```python
        import os, mine
        number = 1
        ```
        ```bash
        ls mine.py   # the file of the title
        echo bash > order.txt
        ! test -e nothing
        ```
        1. in a list
            ```python
            def after():
                return f"{open('order.txt').read()}{mine.word} {number} {__name__}"
            together = after()
            open("order.txt", "w").write(together)
            ```
        ```bash
        python -c "import proxima; print(proxima.__file__)" > where.txt
        echo "$OMP_NUM_THREADS $HF_HUB_OFFLINE" >> where.txt
        ```
        <!-- not run: needs a GPU -->
        ```bash
        touch never.txt
        ```
        """)
    assert (folder / "order.txt").read_text() == "bash\nwritten 1 __main__"
    assert (folder / "where.txt").read_text().endswith("/src/proxima/__init__.py\n1 1\n")
    assert not (folder / "never.txt").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "x\n```bash\necho one\nfalse\necho two\n```",
            ["page.md, line 2: bash ended with 1 at line 4", "one"],
        ),
        ("```bash\nfalse | cat\n```", ["at line 2"]),
        ("```bash\n! true  # that it fails\necho two\n```", ["at line 2", "was to fail"]),
        ("```bash\n! no_such_program \\\n  now\necho two\n```", ["at line 3", "was to fail"]),
        ("```bash\nproxima fly\n```", ["ended with 2", "unknown command 'fly'"]),
        (
            "```python\nx = 1\n```\n```python\nprint('said')\nx / 0\n```",
            ["line 4: Python raised", "page.md", "line 6", "said"],
        ),
        ("```python\nraise SystemExit\n```", ["line 1: Python raised", "SystemExit"]),
        ("```python\nimport os; os._exit(3)\n```", ["the Python process ended with 3"]),
        ("```bash\ncat late.txt\n```\n```text title='late.txt'\nx\n```", ["late.txt"]),
    ],
)
def test_a_block_that_fails_fails_its_page_and_says_where(run, text, says):
    with pytest.raises(AssertionError) as caught:
        run(text)
    for part in says:
        assert part in str(caught.value)


def test_nothing_that_a_block_started_outlives_it(run):
    folder = run("```bash\n(sleep 0.5; touch late.txt) &\n```\n```bash\nsleep 0.8\n```")
    assert not (folder / "late.txt").exists()


def test_a_server_that_answers_is_stopped_and_the_page_goes_on(run):
    folder = run(SERVER.replace("CODE", "403") + "\n```bash\ntouch after.txt\n```")
    assert (folder / "after.txt").exists()


@pytest.mark.parametrize(
    ("text", "limit", "says"),
    [
        (SERVER.replace("CODE", "500"), 1, "no address that it printed answered"),
        ("<!-- server -->\n```bash\nsleep 60\n```", 0.5, "no address that it printed answered"),
        ("<!-- server -->\n```bash\necho http://127.0.0.1:9\n```", 60, "the server exited with 0"),
        (
            SERVER.replace("CODE", "200").replace('print("stopped")', "sys.exit(3)"),
            60,
            "ended with 3 after Ctrl-C",
        ),
    ],
)
def test_a_server_that_does_not_answer_or_ends_badly_fails_its_page(run, text, limit, says):
    with pytest.raises(AssertionError, match=says):
        run(text, server_start=limit)


def test_sampled_files_can_be_small_for_all_that_reads_them(run):
    text = """
        ```bash
        proxima data sample data > said.txt
        cat data/*.jsonl | wc -l > rows.txt
        grep -h batch_size data/*.yaml > batches.txt
        ! proxima data sample
        ```
    """
    folder = run(text, small=True)
    assert "posts to summarise" in (folder / "said.txt").read_text()
    assert int((folder / "rows.txt").read_text()) == 64 + 12 + 96 + 96 + 192
    assert [int(line.split()[1]) for line in (folder / "batches.txt").read_text().splitlines()] == [
        16,
        8,
        16,
        16,
        8,
    ]
