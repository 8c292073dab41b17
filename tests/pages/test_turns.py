"""A chat prompt is a conversation on every page: markup never, hostile texts as text."""

import json
import sqlite3

import pytest

from proxima.cli import main
from proxima.core.types import Prompt
from proxima.data import read_prompts
from proxima.evaluator import evaluate_run
from proxima.pages.label import Item, Store
from proxima.pages.label.label_page import shown
from proxima.pages.report import write_report
from proxima.pages.report.report_samples import before_and_after
from proxima.pages.studio.sample_table import follow
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import Run
from tests.conftest import count_e
from tests.fake_run import HOSTILE
from tests.pages.test_label_browser import CHROMIUM, DRIVER, open_browser

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi there"}]
TURNS = [{"role": "system", "text": "Be kind."}, {"role": "user", "text": "Hi there"}]


@pytest.fixture
def trained(make_config, tmp_path):
    """A run on conversations, one of them hostile; its prompts."""
    trainer = PPOTrainer(make_config(batch_size=2, eval_every=9, max_new_tokens=4))
    trainer.tokenizer.chat_template = TEMPLATE
    rows = [{"prompt": TALK}, {"prompt": [{"role": "user", "content": HOSTILE[:80]}]}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts = read_prompts(tmp_path / "p.jsonl", trainer.tokenizer)
    return trainer.train(prompts, 1, prompts).run_folder, list(prompts)


def test_a_run_keeps_the_turns_and_every_page_shows_them(trained):
    folder, prompts = trained
    assert prompts[0].turns == TURNS
    assert "<|im_start|>" in prompts[0]
    run = Run(folder)
    assert {sample["kind"] for sample in run.tokens(1)} == {"followed", "trained"}
    assert all(sample["turns"] for sample in run.tokens(1))
    assert all(row["turns"] for row in run.samples())
    assert follow(run.samples())["rows"][0]["turns"] == TURNS
    assert before_and_after(run)[1][0].turns == TURNS
    page = write_report(run).read_text()
    body = page.split('<script type="application/json"')[0]
    assert "im_start" not in body
    assert "Be kind." in body
    assert "<summary>system</summary>" in body
    assert "<script>document" not in body


def test_an_evaluation_keeps_them_too(trained):
    folder, prompts = trained
    samples = evaluate_run(folder, prompts, (count_e,))["samples"]
    assert samples[0]["turns"] == TURNS
    assert before_and_after(Run(folder))[1][0].turns == TURNS


def test_a_run_that_kept_none_is_read_back(trained):
    folder, _ = trained
    for path in (folder / "tokens").iterdir():
        record = json.loads(path.read_text())
        for sample in record["samples"]:
            del sample["turns"]
        path.write_text(json.dumps(record))
    assert Run(folder).tokens(0)[0]["turns"] == TURNS
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if name != "turns"} for line in lines]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert follow(Run(folder).samples())["rows"][0]["turns"] == TURNS


def test_a_prompt_that_was_cut_is_shown_as_the_model_saw_it(make_config):
    trainer = PPOTrainer(make_config(truncate_prompts=True))
    long = Prompt("<|im_start|>user\n" + "x" * 2000, turns=TURNS)
    [read], _, cut = trainer.generator.tokenize([long])
    assert cut.all()
    assert read.turns == []


def test_the_label_page_has_them_and_older_files_do(tmp_path):
    old = Store(tmp_path / "old.db")
    with sqlite3.connect(old.path) as db:  # as older versions wrote it
        db.execute("DROP TABLE turns")
    store = Store(old.path)
    rendered = f"<|im_start|>user\n{HOSTILE}<|im_end|>\n<|im_start|>assistant\n"
    store.add_items(
        [Item(Prompt("any markup", turns=TURNS), "a", "b"), Item(rendered, "a", "b"), Item("p", "a", "b")]
    )
    assert [shown(store, item, "ann")["turns"] for item in store.items()] == [
        TURNS,
        [{"role": "user", "text": HOSTILE.strip()}],
        [],
    ]
    with sqlite3.connect(store.path) as db:  # a stranger's file
        db.execute("UPDATE turns SET turns = ?", ("[[[",))
    assert shown(store, store.item(1), "ann")["turns"] == []


def test_generate_prints_turns(tiny, capsys):
    prompt = "<|im_start|>user\nHi\x1b[2J<|im_end|>\n<|im_start|>assistant\n"
    main(["generate", "--model-name", tiny, "--max-new-tokens", "3", "--prompt", prompt, "plain"])
    said = capsys.readouterr().out
    assert said.startswith("user: Hi\\x1b[2J\nassistant: ")
    assert "\nplain\n  -> " in said
    assert "im_start" not in said


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium or chromedriver on this machine")
def test_the_microscope_of_a_report_shows_turns(trained):
    folder, _ = trained
    path = write_report(Run(folder))
    driver = open_browser()
    try:
        driver.get(path.resolve().as_uri())
        assert driver.execute_script("return document.querySelectorAll('.scope-prompt .turn').length") >= 2
        assert (
            driver.execute_script("return document.querySelector('.scope-side > .turn > b').textContent")
            == "assistant"
        )
        options = driver.execute_script("return document.getElementById('pick-sample').textContent")
        assert "Hi there" in options
        assert "im_start" not in options
        assert driver.title != "taken"
        assert driver.get_log("browser") == []
    finally:
        driver.quit()
