"""Reports: every kind of run gets one, what it says is so, and it loads nothing, leaks nothing and trusts
no text."""

import fcntl
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from proxima import Run
from proxima.cli import main
from proxima.cli.report_command import Report
from proxima.config.secrets import shareable
from proxima.pages.report import summary, write_report
from proxima.pages.report.report_curves import chart, charts_by_group, constants, frontier
from proxima.pages.report.report_samples import BYTES, STEPS, before_and_after, embedded_tokens
from proxima.pages.report.run_facts import tell
from proxima.pages.report.run_outcome import HeldOutNumbers, Interval, judge
from proxima.pages.web.single_file import as_json, read_script
from tests.fake_run import HOSTILE, metrics_at, token_sample, write_run, write_tokens

ROOT = Path(__file__).parents[2]


def rewrite(folder, change):
    """The run's metrics with each line changed."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))


class Tags(HTMLParser):
    """Elements of a page, their addresses, and the data inside."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.data, self.inside = [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append((tag, given))
        self.inside = given.get("type") == "application/json"
        self.addresses += [
            value
            for name, value in attributes
            if name in ("src", "href", "srcset", "action", "data", "poster")
        ]

    def handle_data(self, text):
        if self.inside:
            self.data += text
            self.inside = False


def page_of(path):
    text = Path(path).read_text(encoding="utf-8")
    tags = Tags(text)
    assert all(address.startswith(("#", "data:,")) for address in tags.addresses)
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text
    assert sum(tag == "script" for tag, _ in tags.tags) == 2  # the data, and the page's own
    assert not any(name.startswith("on") for _, given in tags.tags for name in given)
    return text, json.loads(tags.data)


def kinds(tmp_path):
    """One run of every kind, by name."""
    made = {"finished": write_run(tmp_path / "finished", 40), "one": write_run(tmp_path / "one", 1)}
    made["training"] = write_run(tmp_path / "training", 20, finished=False)
    made["without_samples"] = write_run(tmp_path / "without_samples", 20, samples=False)
    made["nothing_yet"] = write_run(tmp_path / "nothing_yet", 0, finished=False)
    made["nan"] = write_run(tmp_path / "nan", 20)
    rewrite(
        made["nan"], lambda line: {name: value if name == "step" else None for name, value in line.items()}
    )
    made["some_nan"] = write_run(tmp_path / "some_nan", 20)
    rewrite(made["some_nan"], lambda line: {**line, "avg_reward": None} if line["step"] % 3 else line)
    made["hostile"] = write_run(tmp_path / "hostile", 20, hostile=True)
    return made


def test_every_kind_of_run_has_a_report(tmp_path):
    for name, folder in kinds(tmp_path).items():
        with (folder / ".lock").open("w") as lock:
            if name == "training":
                fcntl.flock(lock, fcntl.LOCK_EX)
            run = Run(folder)
            text, data = page_of(write_report(run))
            assert run.name in text
            assert summary(run)
            assert ("still training" in text) == (name == "training")
            assert bool(data["tokens"]) == (name not in ("without_samples", "nothing_yet"))
            assert len(text) < 1_000_000
    assert "No step has been logged yet" in (tmp_path / "nothing_yet" / "report.html").read_text()
    assert "none of them has a reward" in (tmp_path / "nan" / "report.html").read_text()
    assert "1 step of 64 prompts" in (tmp_path / "one" / "report.html").read_text()


def test_the_report_of_a_real_run_is_written_and_named_by_train(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\nfour\n")
    flags = [
        "--model",
        tiny,
        "--data",
        "prompts.txt",
        "--rewards",
        "length_band,low=1,high=9",
        "--max-new-tokens",
        "4",
    ]
    main(
        [
            "train",
            *flags,
            "--batch-size",
            "2",
            "--minibatch-size",
            "2",
            "--ppo-epochs",
            "1",
            "--run-name",
            "r",
        ]
    )
    assert "report: runs/r/report.html" in capsys.readouterr().out
    text, data = page_of("runs/r/report.html")
    assert "4 prompts from prompts.txt" in text
    assert (
        "proxima train --config runs/r/config.yaml --run-name r-again --data prompts.txt --epochs 1" in text
    )
    run = Run("runs/r")
    drawn = {one["name"] for chart in data["charts"] for one in chart["series"]}
    told = {
        "step",
        "epoch",
        "reward/length_band",
        *constants(run.metrics()),
    }  # the one reward is the reward itself
    assert {name for name in run.metrics() if name not in drawn} <= told
    stored = run.tokens(run.token_steps()[0])[0]
    assert data["tokens"][0]["samples"][0]["columns"] == stored["columns"]
    (tmp_path / "runs" / "r" / "report.html").unlink()
    main(["report", "runs/r", "--output", "elsewhere.html"])
    assert "report: elsewhere.html" in capsys.readouterr().out
    assert page_of("elsewhere.html")[1] == data
    assert not (tmp_path / "runs" / "r" / "report.html").exists()


def test_a_report_that_cannot_be_written_never_fails_a_run(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    (tmp_path / "runs" / "r" / "report.html").mkdir(parents=True)  # a folder where the file should be
    flags = [
        "--model",
        tiny,
        "--data",
        "prompts.txt",
        "--rewards",
        "length_band,low=1,high=9",
        "--max-new-tokens",
        "2",
    ]
    main(
        [
            "train",
            *flags,
            "--batch-size",
            "2",
            "--minibatch-size",
            "2",
            "--ppo-epochs",
            "1",
            "--run-name",
            "r",
        ]
    )
    shown = capsys.readouterr()
    assert "stopped: all epochs done" in shown.out
    assert "the report could not be written" in shown.err


def test_a_folder_without_a_run_is_refused(tmp_path):
    (tmp_path / "no").mkdir()
    with pytest.raises(ValueError, match="holds no run"):
        Report(tmp_path / "no").run()
    with pytest.raises(ValueError, match="is not the folder of a run"):
        Report(tmp_path / "nowhere").run()
    assert list((tmp_path / "no").iterdir()) == []
    folder = write_run(tmp_path / "r", 2)
    with pytest.raises(ValueError, match=r"cannot write the report .*Is a directory; choose another place"):
        Report(folder, tmp_path / "no").run()
    Report(folder, tmp_path / "new" / "deep" / "report.html").run()
    assert (tmp_path / "new" / "deep" / "report.html").is_file()


# --- what it says ---


def rewards(*values):
    return {"step": list(range(1, len(values) + 1)), "avg_reward": list(values)}


@pytest.mark.parametrize(
    ("values", "better", "words"),
    [
        ([0.0, 0.1] * 10 + [1.0, 1.1] * 10, True, "rose from 0.04 ± 0.048 to 1.06"),
        ([1.0, 1.1] * 10 + [0.0, 0.1] * 10, False, "fell from"),
        ([0.0, 1.0] * 20, None, "no more than its noise"),
        ([0.0, 1.0, 2.0, 3.0], None, "so few steps"),
        ([0.5], None, "One step was logged"),
        ([], None, "No step"),
        ([math.nan] * 9, None, "9 steps were logged, and none of them has a reward"),
    ],
)
def test_the_conclusion_knows_noise(values, better, words):
    told, said = judge(rewards(*values), None)
    assert words in told
    assert said is better


def test_held_out_numbers_come_first_and_those_of_eval_before_all(tmp_path):
    folder = write_run(tmp_path / "r", 30)
    ends = {"validation/win_rate": 0.8, "validation/win_rate_low": 0.7, "validation/win_rate_high": 0.9}
    rewrite(folder, lambda line: {**line, **ends} if line["step"] == 30 else line)
    story = tell(Run(folder))
    assert (
        "from 0.5 to 1.5; by this reward its answers beat those of the reference 80 % of the time (95 %: 70 to"
        " 90 %)" in story.conclusion
    )
    assert story.better is True
    asked = {
        "reference": {"avg_reward": 2.0},
        "policy": {"avg_reward": 1.0, "reward_low": 0.9, "reward_high": 1.1},
        "win_rate": {"rate": 0.2, "low": 0.1, "high": 0.3},
        "samples": [
            {
                "prompt": "p",
                "reference": "old",
                "policy": "new",
                "reference_reward": 2.0,
                "policy_reward": None,
            }
        ],
    }
    (folder / "evaluation.json").write_text(json.dumps({**asked, "step": 20}))
    assert "from 0.5 to 1.5" in tell(Run(folder)).conclusion  # the run went on since
    (folder / "evaluation.json").write_text(json.dumps({**asked, "step": 30}))
    story = tell(Run(folder))
    assert "from 2 to 1 (95 %: 0.9 to 1.1)" in story.conclusion
    assert story.better is False
    source, [pair] = before_and_after(Run(folder))
    assert "proxima eval" in source
    assert (pair.before, pair.after, pair.after_score) == ("old", "new", None)
    (folder / "evaluation.json").write_text(
        '{"reference": 5, "policy": [], "win_rate": {"rate": "<b>"}, "samples": {"a": 1}}'
    )
    assert "from 0.5 to 1.5" in tell(Run(folder)).conclusion
    assert before_and_after(Run(folder))[1]


@pytest.mark.parametrize(
    ("ends", "better"),
    [((0.6, 0.8), True), ((0.2, 0.4), False), ((0.4, 0.8), None), ((math.nan, math.nan), True)],
)
def test_a_held_out_reward_within_its_interval_shows_nothing(ends, better):
    measured = HeldOutNumbers(0.5, Interval(0.7 if better is not False else 0.3, *ends), None, "")
    assert judge({}, measured)[1] is better


def test_the_start_is_the_reference_where_it_answered_not_the_first_evaluation(tmp_path):
    folder = write_run(tmp_path / "r", 30)
    rewrite(
        folder,
        lambda line: {**line, "validation/reference_reward": -0.25} if "validation/reward" in line else line,
    )
    assert "from -0.25 to 1.5" in tell(Run(folder)).conclusion


def test_a_stage_before_ppo_is_told_apart_from_a_run(tmp_path, capsys):
    (tmp_path / "stage.yaml").write_text("seed: 0\n")
    with pytest.raises(SystemExit) as stop:
        main(["report", str(tmp_path)])
    assert stop.value.code == 2
    assert "reward.json" in capsys.readouterr().err


def test_before_and_after_are_the_same_prompts(tmp_path):
    folder = write_run(tmp_path / "r", 10, samples=False)
    write_tokens(
        folder, 1, [token_sample(1, text="old a", prompt="A"), token_sample(1, text="old b", prompt="B")]
    )
    write_tokens(
        folder, 9, [token_sample(9, text="new b", prompt="B"), token_sample(9, "trained", "new a", "A")]
    )
    source, [pair] = before_and_after(Run(folder))
    assert source == "The same prompts, answered at step 1 and at step 9."
    assert (pair.prompt, pair.before, pair.after) == ("B", "old b", "new b")


def test_every_number_is_drawn_once_or_listed_as_constant(tmp_path):
    run = Run(write_run(tmp_path / "r", 30))
    metrics = {
        **run.metrics(),
        "my/own": [float(i) for i in range(30)],
        "kl_low": [0.0] * 30,
        "kl_high": [9.0] * 30,
    }
    groups = charts_by_group(metrics)
    names = [one["name"] for _, charts in groups for chart in charts for one in chart["series"]]
    assert len(names) == len(set(names))
    assert set(metrics) - set(names) <= {"step", "epoch", "kl_low", "kl_high", *constants(metrics)}
    assert groups[-1][0].title == "Other metrics"
    [kl] = [one for _, charts in groups for chart in charts for one in chart["series"] if one["name"] == "kl"]
    assert kl["band"][0] == [1.0, 0.0, 9.0]
    assert all(chart["note"] for _, charts in groups[:-1] for chart in charts)


def test_a_chart_says_what_its_metrics_are_and_when_they_are_healthy():
    metrics = {
        "step": [1.0, 2.0],
        "avg_reward": [0.0, 1.0],
        "kl": [0.0, 1.0],
        "kl_exact": [0.0, 2.0],
        "my/own": [3.0, 4.0],
    }
    charts = {one["title"]: one for _, charts in charts_by_group(metrics) for one in charts}
    told = charts["KL to the reference"]["about"]
    assert [one["name"] for one in told] == ["kl", "kl_exact"]
    assert charts["KL to the reference"]["note"] == "Sampled KL (kl), KL to the reference (kl_exact)."
    assert charts["Training reward"]["note"] == charts["Training reward"]["about"][0]["meaning"]
    assert "raise kl_coef" in told[0]["otherwise"]
    assert not any(
        "`" in text for one in charts.values() for about in one["about"] for text in about.values()
    )
    [both] = chart({**metrics, "reward/a": [0.0, 1.0], "reward/b": [1.0, 0.0]}, ["reward/a", "reward/b"])[
        "about"
    ]
    assert (both["name"], both["title"], both["unit"]) == ("reward/a, reward/b", "Reward", "score")
    assert (charts["my/own"]["about"], charts["my/own"]["note"]) == ([], "")


def test_a_single_reward_is_not_drawn_twice():
    nan = math.nan
    metrics = {"step": [1.0, 2.0, 3.0], "avg_reward": [0.0, nan, 1.0], "reward/a": [0.0, nan, 1.0]}

    def drawn():
        return [
            one["name"]
            for _, charts in charts_by_group(metrics)
            for chart in charts
            for one in chart["series"]
        ]

    assert drawn() == ["avg_reward"]
    metrics["reward/a"] = [0.0, nan, 2.0]
    assert drawn() == ["avg_reward", "reward/a"]
    metrics |= {"reward/a": [0.0, nan, 1.0], "reward/b": [0.5, nan, 0.0]}
    assert drawn() == ["avg_reward", "reward/a", "reward/b"]


def test_a_long_noisy_curve_has_its_running_mean(tmp_path):
    metrics = {
        "step": [float(i) for i in range(1, 101)],
        "noisy": [float(i % 2) for i in range(100)],
        "calm": list(range(100)),
    }
    noisy = chart(metrics, ["noisy"])
    assert noisy["note"] == "The strong line is the running mean over 5 steps."
    assert noisy["series"][0]["trend"][-1] == [100, pytest.approx(0.6)]
    assert "trend" not in chart(metrics, ["calm"])["series"][0]
    short = {name: values[:59] for name, values in metrics.items()}
    assert "trend" not in chart(short, ["noisy"])["series"][0]


def test_curves_and_tokens_are_bounded(tmp_path):
    folder = write_run(tmp_path / "long", 3000, eval_every=10)
    text, data = page_of(write_report(Run(folder)))
    assert len(text) < 2_000_000
    assert max(len(one["points"]) for chart in data["charts"] for one in chart["series"]) <= 402
    assert len(data["tokens"]) == STEPS
    assert (data["tokens"][0]["step"], data["tokens"][-1]["step"]) == (10, 3000)
    assert "12 of 300 logged" in text
    big = write_run(tmp_path / "big", 100, samples=False)
    for step in (1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 97, 98, 100):
        write_tokens(
            big,
            step,
            [token_sample(step, "trained", "word " * 1200) for _ in range(3 if step in (1, 100) else 1)],
        )
    steps = embedded_tokens(Run(big))
    assert 2 < len(steps) < STEPS
    assert len(json.dumps(steps)) < 1.1 * BYTES
    assert (steps[0]["step"], steps[-1]["step"]) == (1, 100)
    huge = write_run(tmp_path / "huge", 2, samples=False)
    for step in (1, 2):
        write_tokens(huge, step, [token_sample(step, "trained", "word " * 2000) for _ in range(20)])
    steps = embedded_tokens(Run(huge))
    assert len(json.dumps(steps)) < 1.1 * BYTES
    assert all(len(step["samples"]) + step["left_out"] == 20 for step in steps)
    assert "of their samples are too large for this file" in page_of(write_report(Run(huge)))[0]


def test_the_frontier_is_reward_against_kl_in_order_of_steps(tmp_path):
    spec = frontier(Run(write_run(tmp_path / "r", 30)).metrics())
    assert spec["series"][0]["points"][0] == [pytest.approx(5 / 3), 0.5, "step 10"]
    training = {"step": [1.0, 2.0], "avg_reward": [1.0, 2.0], "kl_exact": [0.5, 0.1]}
    assert [point[:2] for point in frontier(training)["series"][0]["points"]] == [[0.5, 1.0], [0.1, 2.0]]
    longer = {
        "step": list(range(1, 10)),
        "avg_reward": [1.0] * 3 + [2.0] * 3 + [4.0] * 3,
        "kl_exact": [0, 1, 2, 3, 4, 5, 6, 7, 8],
    }
    assert frontier(longer)["series"][0]["points"][1] == [4.0, 2.0, "steps 4 to 6"]
    assert frontier({"step": [1.0], "avg_reward": [1.0], "kl_exact": [0.5]}) is None


# --- hostile texts, secrets ---


def test_data_in_a_page_cannot_leave_its_place():
    text = as_json({"a": HOSTILE, "b": math.nan, "c": "\ud800", "<": ["</script>", "<!--", "\u2028"]})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"a": HOSTILE, "b": None, "c": "\ud800", "<": ["</script>", "<!--", "\u2028"]}


def test_a_hostile_run_is_text(tmp_path):
    text, data = page_of(write_report(Run(write_run(tmp_path / "r", 20, hostile=True))))
    assert "<img" not in text
    assert 'id="taken"' not in text
    assert "\x00" not in text
    assert "\x1b" not in text
    assert data["tokens"][0]["samples"][0]["tokens"][-1].endswith("… (100,001 characters)")
    shown = summary(Run(tmp_path / "r"))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e\u2028]", shown)


def test_addresses_are_shown_without_what_is_not_for_all(tmp_path):
    folder = write_run(tmp_path / "r", 3)
    config = (folder / "config.yaml").read_text()
    secret = "https://me:hunter2@host/score?api_key=hunter2&x=1"
    (folder / "config.yaml").write_text(config.replace("source: length_band", f"source: {secret}"))
    text, _ = page_of(write_report(Run(folder)))
    assert "hunter2" not in text + summary(Run(folder))
    assert "https://***@host/score?api_key=***&amp;x=1" in text
    assert shareable("runs/a?b=1 me@host") == "runs/a?b=1 me@host"


def test_a_report_holds_no_secret_of_the_environment(tmp_path):
    folder = write_run(tmp_path / "r", 3)
    env = {
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": os.environ["PATH"],
        "HF_TOKEN": "sec-9f27",
        "REWARD_TOKEN": "sec-9f27",
    }
    done = subprocess.run(
        [sys.executable, "-m", "proxima", "report", folder],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "sec-9f27" not in done.stdout + done.stderr + (folder / "report.html").read_text()


# --- notebooks ---


def test_plots_show_themselves(tmp_path):
    run = Run(write_run(tmp_path / "r", 20))
    plot = run.plot("avg_reward", ["kl", "kl_exact"])
    assert [chart["title"] for chart in plot.charts] == ["Training reward", "KL to the reference"]
    assert [chart["y"] for chart in plot.charts] == ["score", "nats"]
    assert plot.charts[0]["series"][0]["points"][4] == [5, metrics_at(5, 20)["avg_reward"]]
    assert plot._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html')
    assert page_of(plot.save(tmp_path / "plot.html"))[1] == {"charts": plot.charts}
    assert len(run.plot().charts) == 3
    with pytest.raises(ValueError, match=r"no 'avg_rewards'; did you mean avg_reward"):
        run.plot("avg_rewards")


def test_the_bundle_is_one_module():
    script = read_script(
        "dom.js",
        "chart.js",
        "microscope.js",
        ROOT / "src" / "proxima" / "pages" / "report" / "static" / "report.js",
    )
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    names = re.findall(r"^(?:const|let|function|class) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names))
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts)\b", script)
