"""docs/reference is what the code says now: what is committed is what the tool writes, and its links lead
somewhere."""

import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from proxima.cli import parse
from proxima.cli.commands import COMMANDS
from proxima.config import FinetuningConfig, PPOConfig, RewardConfig
from proxima.config.setting_declaration import declarations
from proxima.runs.glossary import FINETUNING, GLOSSARY
from tools.reference import OUT, pages, write
from tools.reference.settings import EXAMPLES
from tools.reference.source import fields_of, linked, readers

ROOT = Path(__file__).parents[2]
PAGES = pages()
SETTINGS = {field.name for kind in (PPOConfig, RewardConfig) for field in dataclasses.fields(kind)}
PPO, FINE = ({field.name for field in dataclasses.fields(kind)} for kind in (PPOConfig, FinetuningConfig))
TAKERS = {
    PPOConfig: ("train", "ppo"),
    FinetuningConfig: ("sft", "finetuning"),
    RewardConfig: ("reward", "reward_training"),
}


def test_what_is_committed_is_what_would_be_written():
    there = {path.relative_to(OUT).as_posix(): path.read_text(encoding="utf-8") for path in OUT.rglob("*.*")}
    assert sorted(there) == sorted(PAGES), "run `make reference`"
    assert [path for path in PAGES if there[path] != PAGES[path]] == [], "run `make reference`"


def test_every_command_setting_and_metric_has_its_place():
    assert {f"settings/{name}.md" for name in SETTINGS} <= set(PAGES)
    assert {f"commands/{name}.md" for name in COMMANDS} <= set(PAGES)
    assert len(PAGES) == len(SETTINGS) + len(COMMANDS) + 3
    assert [name for name in (*GLOSSARY, *FINETUNING) if f"`{name}`" not in PAGES["metrics.md"]] == []
    order = re.findall(r"^\| \[`([a-z-]+)`\]", PAGES["commands/index.md"], re.M)
    assert order == list(COMMANDS)
    assert sorted(re.findall(r"^\| \[`([a-z_]+)`\]", PAGES["settings/index.md"], re.M)) == sorted(SETTINGS)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_setting_has_meaning_default_range_and_a_line_that_is_taken(name):
    text = PAGES[f"settings/{name}.md"]
    for row in ("Type", "Default", "Range", "Taken by"):
        assert re.search(rf"^\| {row} \| \S", text, re.M)
    kind = PPOConfig if name in PPO else FinetuningConfig if name in FINE else RewardConfig
    assert len(fields_of(kind)[name].meaning) > 15
    values = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.S)[1])
    assert name in values
    made = kind.from_dict(values)
    flags = shlex.split(re.search(r"As a flag `([^`]+)`", text)[1])
    beside = [
        word for key in values if key != name for word in (f"--{key.replace('_', '-')}", *_words(values[key]))
    ]
    takes, holder = TAKERS[kind]
    command = parse([takes, "--data", "x", *flags, *beside])
    assert getattr(getattr(command, holder), name) == getattr(made, name)
    assert getattr(eval(re.search(r"in Python `([^`]+)`", text)[1]), name) == getattr(made, name)
    assert "`src/proxima/" in text


def _words(value):
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def test_rules_beside_the_ranges_are_those_of_the_config():
    for name in ("dual_clip", "length_limit"):
        PPOConfig(**{name: 0.0})
        PPOConfig(**{name: 1.01})
        with pytest.raises(ValueError, match=name):
            PPOConfig(**{name: 1.0})
    for name in ("rewards", "judges"):
        with pytest.raises(ValueError, match="same name"):
            PPOConfig(**{name: ["a:f", "b:f"]})
    for values in (
        {"run_name": ".x"},
        {"trackers": ["x"]},
        {"engine_urls": EXAMPLES["engine_urls"]["engine_urls"]},
        {"overlap": True},
    ):
        with pytest.raises(ValueError, match=next(iter(values))):
            PPOConfig(**values)


def test_the_index_lists_what_a_resumed_run_may_change():
    listed = PAGES["settings/index.md"].split("## What a resumed run may change")[1]
    free = {name for name, each in declarations(PPOConfig).items() if not each.changes_results}
    assert set(re.findall(r"\[`(\w+)`\]", listed)) == free
    assert {"engine_urls", "judges", "max_skipped_updates", "on_guard"} <= free
    assert not {"seed", "kl_coef", "rewards", "dtype", "overlap"} & free
    for name in PPO:
        assert ("may change it only with" in PAGES[f"settings/{name}.md"]) == (name not in free)


def test_readers_are_found():
    assert "src/proxima/ppo_trainer/model_trainer.py" in readers()["kl_stop"]
    assert not any(path.startswith("src/proxima/config") for paths in readers().values() for path in paths)
    assert set(readers()) == SETTINGS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_page_has_its_example_and_its_own_flags(name):
    text = PAGES[f"commands/{name}.md"]
    assert COMMANDS[name].example in text
    for field in fields_of(COMMANDS[name]).values():
        assert f"| `{field.flag}`" in text
    for heading in ("Example", "Flags", "What it writes", "Exit codes", "More"):
        assert f"\n## {heading}\n" in text


def test_the_index_runs_every_example_but_those_that_are_slow():
    blocks = re.findall(r"(?:<!-- ([^\n]+?) -->\n)?```bash\n(.*?)```", PAGES["commands/index.md"], re.S)
    run = {
        line.split("#")[0].strip()
        for mark, lines in blocks
        if not mark.startswith("not run")
        for line in lines.splitlines()
    }
    assert {name for name, kind in COMMANDS.items() if kind.example not in run} == {
        "demo",
        "bench",
        "migrate",
    }
    shown = {
        line
        for name in COMMANDS
        for block in re.findall(r"```bash\n(.*?)```", PAGES[f"commands/{name}.md"], re.S)
        for line in block.splitlines()
    }
    assert shown - run == {COMMANDS[name].example for name in ("demo", "bench", "migrate")}
    for line in run | shown:
        assert parse(shlex.split(line)[1:]) is not None
    servers = [lines for mark, lines in blocks if mark == "server"]
    assert [lines.split()[1] for lines in servers] == ["label", "serve-reward", "studio"]


def test_links_lead_to_pages_and_anchors_that_are_there():
    for path, text in PAGES.items():
        for target in re.findall(r"\]\(([^)]+)\)", text):
            page, _, spot = target.partition("#")
            found = (OUT / path).parent / page
            assert found.resolve().is_file(), f"{path}: {target}"
            if spot:
                there = found.read_text(encoding="utf-8")
                slugs = {
                    re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
                    for title in re.findall(r"^#+ (.+)$", there, re.M)
                }
                assert spot in slugs | set(re.findall(r'id="([^"]+)"', there)), f"{path}: {target}"


def test_only_names_become_links():
    assert linked("raise `kl_coef`, see docs/rewards.md and `x`", "../") == (
        "raise [`kl_coef`](settings/kl_coef.md), see [rewards.md](../rewards.md) and `x`"
    )
    assert linked("`kl_coef` and `proxima data check`", "../../", "kl_coef") == (
        "`kl_coef` and [`proxima data check`](../commands/data.md)"
    )


def test_writing_removes_what_is_stale_and_gives_the_same_bytes(tmp_path):
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "gone.md").write_text("old")
    assert write(tmp_path) == write(tmp_path) == len(PAGES)
    assert not (tmp_path / "settings" / "gone.md").exists()
    assert all((tmp_path / path).read_text(encoding="utf-8") == text for path, text in PAGES.items())
    assert all(
        text.startswith("# ") and text.split("\n")[1].startswith("<!-- Generated") and str(ROOT) not in text
        for text in PAGES.values()
    )


def test_the_tool_needs_no_torch():
    code = (
        "import sys, tools.reference as r; r.pages(); assert not {'torch', 'transformers', 'tyro'} & "
        "set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": ""},
    )
