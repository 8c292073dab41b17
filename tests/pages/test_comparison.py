"""`proxima compare`: seeds as one curve, the frontier, win rates between runs; from folders alone or by
answering prompts."""

import json
import math
import re
import shutil
import statistics
import subprocess
from dataclasses import replace

import pytest

from proxima.cli import main, parse
from proxima.config import PPOConfig, RewardSpec
from proxima.evaluator.finished_run import open_run
from proxima.pages.comparison import compare_runs
from proxima.pages.comparison.comparison_page import lines, write_page
from proxima.pages.comparison.run_comparison import curves, frontier, named_runs, table
from proxima.pages.comparison.seed_groups import NORMAL, T, group_by_seed, mean_curve, t_interval
from proxima.ppo_trainer import PPOTrainer
from tests.fake_run import HOSTILE, write_run

NAN = math.nan


def t_density(x, degrees):
    scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    return scale * (1 + x * x / degrees) ** (-(degrees + 1) / 2)


@pytest.mark.parametrize("degrees", range(1, 31))
def test_every_quantile_of_students_t_leaves_a_fortieth_above_it(degrees):
    steps, high = 20_000, T[degrees - 1]
    width = high / steps  # Simpson's rule from 0 up
    inner = sum((4 if i % 2 else 2) * t_density(i * width, degrees) for i in range(1, steps))
    share = (t_density(0, degrees) + inner + t_density(high, degrees)) * width / 3
    assert share == pytest.approx(0.475, abs=1e-6)


def test_intervals_of_the_mean():
    mean, low, high = t_interval([1.0, 2.0, 4.0])
    half = 4.302653 * statistics.stdev([1, 2, 4]) / math.sqrt(3)
    assert (mean, low, high) == pytest.approx((7 / 3, 7 / 3 - half, 7 / 3 + half))
    assert t_interval([5.0])[0] == 5.0
    assert math.isnan(t_interval([5.0])[1])
    many = [float(i % 2) for i in range(100)]
    assert t_interval(many)[2] - 0.5 == pytest.approx(NORMAL * statistics.stdev(many) / 10)


def test_a_mean_curve_has_only_the_steps_that_all_have():
    rows = mean_curve([{1: 1.0, 2: 2.0, 3: NAN, 4: 9.0}, {1: 3.0, 2: 2.0, 3: 1.0}])
    assert [row[:2] for row in rows] == [(1, 2.0), (2, 2.0)]
    assert rows[1][2:] == (2.0, 2.0)
    assert mean_curve([]) == []


def test_runs_that_differ_in_their_seed_only_are_one_group():
    base = {"kl_coef": 0.1, "run_name": "x", "seed": 0, "rewards": [{"source": "a:b"}]}
    configs = {
        "a-seed-0": base,
        "a-seed-1": {**base, "seed": 1, "run_name": "y", "device": "cpu"},
        "b": {**base, "kl_coef": 0.2},
        "c": {**base, "kl_coef": 0.2},  # the same seed twice is not a group
        "broken": {},
        "broken too": {},
    }
    assert group_by_seed(configs) == {"a (2 seeds)": ["a-seed-0", "a-seed-1"]}
    low, high = ({**base, "kl_coef": coef} for coef in (0.1, 0.2))
    four = {f"a-{i}": {**(low if i < 2 else high), "seed": i} for i in range(4)}
    assert group_by_seed(four) == {"a (2 seeds)": ["a-0", "a-1"], "a-2 … a-3 (2 seeds)": ["a-2", "a-3"]}
    assert list(group_by_seed({"7": base, "8": {**base, "seed": 8}})) == ["7 (2 seeds)"]


def run_of(folder, seed=0, **settings):
    path = write_run(folder, steps=40, eval_every=10)
    config = PPOConfig.from_yaml(path / "config.yaml")
    replace(config, seed=seed, run_name=path.name, **settings).to_yaml(path / "config.yaml")
    return path


@pytest.fixture
def folders(tmp_path):
    runs = [run_of(tmp_path / f"one-{seed}", seed) for seed in range(3)]
    return [*runs, run_of(tmp_path / "two", 0, kl_coef=0.5)]


def test_folders_alone_are_compared_without_loading_a_model(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("proxima.evaluator.finished_run.PPOTrainer", None)
    page = tmp_path / "new" / "page.html"
    main(["compare", *map(str, folders), "--out", str(page)])
    shown = capsys.readouterr().out
    assert "one (3 seeds)" in shown
    assert str(page) in shown
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    for outside in ("http://", "https://", "src=", "@import"):
        assert outside not in text.replace("http://www.w3.org/2000/svg", "")
    result = compare_runs(folders)
    assert result["win_rates"] == {}
    reward = next(chart for chart in result["charts"] if chart["title"] == "Held-out reward")
    assert [one["name"] for one in reward["series"]] == ["one (3 seeds)", "one-0", "one-1", "one-2", "two"]
    assert [one.get("faint", False) for one in reward["series"]] == [False, True, True, True, False]
    assert reward["series"][0]["points"] == [[float(step), 1.5 * step / 40] for step in (10, 20, 30, 40)]
    assert reward["series"][0]["band"][0] == [10, pytest.approx(0.375), pytest.approx(0.375)]
    row = result["rows"][0]
    assert (row["run"], row["state"], row["steps"], row["validation/reward"], row["validation/kl"]) == (
        "one-0",
        "finished",
        40,
        1.5,
        5.0,
    )
    assert result["rows"][-1]["validation/reward"] == pytest.approx([1.5, 1.5, 1.5])


def test_the_frontier_has_a_point_per_evaluation_of_every_run_and_falls_back_to_steps(folders):
    metrics = {name: run.metrics() for name, run in named_runs(folders).items()}
    chart = frontier(metrics, {})[0]
    assert chart["free"]
    assert [len(one["points"]) for one in chart["series"]] == [4] * 4
    assert chart["series"][3]["points"][1] == [2.5, 0.75, "step 20"]
    plain = {
        name: {key: column for key, column in columns.items() if "/" not in key}
        for name, columns in metrics.items()
    }
    assert [len(one["points"]) for one in frontier(plain, {})[0]["series"]] == [40] * 4
    assert frontier({"x": {"step": [1.0], "avg_reward": [NAN], "kl": [1.0]}}, {}) == []
    long = {"x": {name: [float(i) for i in range(10_000)] for name in ("step", "avg_reward", "kl")}}
    points = frontier(long, {})[0]["series"][0]["points"]
    assert len(points) <= 302
    assert points[-1][0] == 9999


def test_the_frontier_has_each_groups_mean_with_its_interval_and_a_chart_for_every_judge_of_all():
    def run(shift, **more):
        columns = {"step": [10.0, 20.0], "validation/kl": [1.0, 3.0 + shift]}
        return {**columns, "validation/reward": [0.5, 0.6 + shift], **more}

    rate = {"validation/win_rate/gold": [0.5, 0.7]}
    metrics = {"a": run(0.0, **rate), "b": run(0.2, **rate), "other": run(0.4, **rate)}
    charts = frontier(metrics, {"both": ["a", "b"]})
    assert [chart["title"].endswith("against KL") for chart in charts] == [True] * 2
    assert "gold" in charts[1]["title"]
    mean, *runs = charts[0]["series"]
    assert [(one["name"], one["faint"]) for one in runs] == [("a", True), ("b", True), ("other", False)]
    assert mean["name"] == "both"
    assert mean["points"][1] == [pytest.approx(3.1), pytest.approx(0.7), "step 20, mean"]
    half = 12.706205 * 0.1  # t(0.975, 1) * s / sqrt(2), s = 0.2 / sqrt(2)
    assert mean["band"][1] == pytest.approx([3.1, 0.7 - half, 0.7 + half], rel=1e-4)
    assert charts[1]["series"][0]["points"][1][:2] == pytest.approx([3.1, 0.7])
    metrics["other"] = run(0.4)  # which had no judge
    assert len(frontier(metrics, {})) == 1


def test_intervals_of_a_run_are_bands_and_numbers_that_are_missing_are_no_curve():
    columns = {"step": [1.0, 2.0, 3.0], "validation/reward": [1.0, NAN, 3.0]}
    columns |= {
        "validation/reward_low": [0.5, NAN, 2.0],
        "validation/reward_high": [1.5, NAN, 4.0],
        "kl": [NAN] * 3,
    }
    charts = curves({"x": columns}, {})
    assert [chart["title"] for chart in charts] == ["Held-out reward"]
    assert charts[0]["series"][0]["points"] == [[1.0, 1.0], [3.0, 3.0]]
    assert charts[0]["series"][0]["band"] == [[1.0, 0.5, 1.5], [3.0, 2.0, 4.0]]
    row = table({"x": columns}, {}, {"x": "stopped"})[0]
    assert tuple(
        row[key] for key in ("best", "validation/reward", "validation/kl", "validation/win_rate")
    ) == (
        3.0,
        3.0,
        None,
        None,
    )


def test_held_out_numbers_stand_beside_held_out_numbers_only():
    trained = {"step": [1.0, 2.0], "avg_reward": [5.0, 4.0], "kl": [1.0, 2.0]}
    judged = {**trained, "validation/reward": [NAN, 0.1], "validation/kl": [NAN, 3.0]}
    both = {"trained": trained, "judged": judged}
    rows = table(both, {}, dict.fromkeys(both, "finished"))
    assert [(row["avg_reward"], row["best"], row["kl"]) for row in rows] == [(4.0, 5.0, 2.0)] * 2
    assert frontier(both, {})[0]["title"] == "Training reward against KL"
    assert [one["name"] for one in frontier(both, {})[0]["series"]] == ["trained", "judged"]
    assert table({"judged": judged}, {}, {"judged": ""})[0]["validation/reward"] == 0.1


def test_scores_of_different_rewards_are_not_set_against_each_other_in_silence(folders, tmp_path, capsys):
    assert compare_runs(folders)["notes"] == []
    other = run_of(tmp_path / "other", rewards=("length_band,low=1,high=3",))
    main(["compare", str(folders[0]), str(other), "--out", str(tmp_path / "page.html")])
    assert "different rewards: their scores have no common scale" in capsys.readouterr().out
    assert "no common scale" in (tmp_path / "page.html").read_text()


def test_names_tell_runs_apart(tmp_path):
    for name in ("a/ppo", "b/ppo"):
        (tmp_path / name).mkdir(parents=True)
    assert list(named_runs([tmp_path / "a" / "ppo", tmp_path / "b" / "ppo"])) == ["a/ppo", "b/ppo"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "at least two runs"),
        (["two"], "at least two runs"),
        (["two", "two/"], "given twice"),
        (["two", "nowhere"], "not the folder of a run"),
        (["two", "empty"], "holds no metrics"),
        (["two", "one-0", "--judges", "a:b"], "need answers to judge: give --data"),
        (["two", "one-0", "--data", "x", "--judges", "a:b,name=rewards"], "give that judge another name"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(folders, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(["compare", *words] if words else ["compare", "--runs"])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "compare.html").exists()


def test_leading_words_are_all_runs():
    command = parse(["compare", "a", "b", "c", "--data", "d"])
    assert (command.runs, command.data) == (("a", "b", "c"), "d")


def test_broken_lines_are_left_out_and_named(folders, tmp_path):
    with (folders[3] / "metrics.jsonl").open("a") as file:
        file.write("not json\n")
    result = compare_runs(folders)
    assert result["problems"] == ["two: metrics.jsonl line 41 is not a record of a step and is left out"]
    assert any(line.startswith("left out: two:") for line in lines(result))
    failed = {"ours": "a", "theirs": "b", "rate": NAN, "low": NAN, "high": NAN, "prompts": 0}
    assert "  a over b: no prompt could be judged" in lines({**result, "win_rates": {"judge": [failed]}})
    assert lines({**result, "problems": ["\x1b[2J\na"]})[-1] == r"left out: \x1b[2J\na"


# --- answers ---


def vowels(prompts, texts):
    return [float(sum(letter in "aeiou" for letter in text)) for text in texts]


def longer(prompts, ours, theirs):
    return [(len(a) > len(b)) - (len(a) < len(b)) for a, b in zip(ours, theirs, strict=True)]


def fails(prompts, ours, theirs):
    raise OSError("away")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_folders):
    """Short runs: two seeds on one base, one on another base, one with another reward."""
    home = tmp_path_factory.mktemp("compared")
    (home / "held_out.txt").write_text("\n".join(f"held out {i}" for i in range(5)))
    for name, changes in {
        "seed-0": {},
        "seed-1": {"seed": 1},
        "llama": {"model_name": tiny_folders["llama"]},
        "other": {"rewards": "length_band,low=1,high=3"},
    }.items():
        settings = {
            "model_name": tiny_folders["qwen3"],
            "rewards": "tests.pages.test_comparison:vowels",
            "learning_rate": 0.05,
        }
        shape = {"batch_size": 4, "max_new_tokens": 6, "lora_r": 4, "checkpoint_every": 0, "token_samples": 1}
        config = PPOConfig(**{**settings, **shape, **changes}, run_dir=str(home), run_name=name)
        PPOTrainer(config).train([f"prompt {i}" for i in range(4)], 2)
    return home


OWN_REWARD = (
    "--rewards",
    "tests.pages.test_comparison:vowels",
)  # a function counts only where the command line names it


def texts_of(folder, prompts):
    trainer = open_run(folder, [RewardSpec(vowels)])
    trainer.load(folder)
    return trainer.generator.sample(prompts, -1).texts()


def test_runs_of_different_bases_answer_the_same_prompts_and_are_judged_in_both_orders(
    trained, tmp_path, capsys
):
    page, names = tmp_path / "page.html", ["seed-0", "seed-1", "llama"]
    judges = ["--judges", "tests.pages.test_comparison:longer", "tests.pages.test_comparison:fails"]
    runs = [str(trained / name) for name in names]
    main(
        ["compare", *runs, "--data", str(trained / "held_out.txt"), *judges, *OWN_REWARD, "--out", str(page)]
    )
    shown = capsys.readouterr().out
    prompts = [f"held out {i}" for i in range(5)]
    texts = {name: texts_of(trained / name, prompts) for name in names}
    data = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
    for ours, theirs in (("seed-0", "seed-1"), ("seed-0", "llama"), ("seed-1", "llama")):
        for judge, values in (
            ("rewards", lambda name: vowels([], texts[name])),
            ("longer", lambda name: map(len, texts[name])),
        ):
            wins = [(a > b) + 0.5 * (a == b) for a, b in zip(values(ours), values(theirs), strict=True)]
            row = next(
                row for row in data["win_rates"][judge] if (row["ours"], row["theirs"]) == (ours, theirs)
            )
            assert row["rate"] == pytest.approx(sum(wins) / 5)
            assert row["low"] <= row["rate"] <= row["high"]
            assert f"{ours} over {theirs}: {row['rate']:.3f}" in shown
    failed = data["win_rates"]["fails"][1]
    same = sum(a == b for a, b in zip(texts["seed-0"], texts["llama"], strict=True))
    assert failed["prompts"] == same  # equal answers are a tie without asking; all others failed
    assert [row["prompt"] for row in data["texts"]] == prompts
    assert data["texts"][0]["answers"]["llama"] == texts["llama"][0]
    assert data["groups"] == {"seed (2 seeds)": ["seed-0", "seed-1"]}


def test_runs_with_different_rewards_need_to_be_told_what_counts(trained, tmp_path, capsys):
    runs, data = [str(trained / name) for name in ("seed-0", "other")], str(trained / "held_out.txt")
    out = ["--out", str(tmp_path / "page.html")]
    with pytest.raises(SystemExit):
        main(["compare", *runs, "--data", data, *out])
    assert "trained with different rewards; say what to compare them by" in capsys.readouterr().err
    main(
        [
            "compare",
            *runs,
            "--data",
            data,
            *out,
            "--judges",
            "tests.pages.test_comparison:longer",
            "--limit",
            "2",
        ]
    )
    shown = capsys.readouterr().out
    assert "Win rates by longer" in shown
    assert "Win rates by rewards" not in shown
    assert "2 prompts" in shown
    main(["compare", *runs, "--data", data, *out, "--rewards", "tests.pages.test_comparison:vowels"])
    assert "Win rates by rewards" in capsys.readouterr().out


def test_runs_with_an_environment_meet_the_same_games_where_it_is_named(make_config, tmp_path, capsys):
    game, asked = "tests.environments.games:Parity", ["one", "two", "three"]
    folders = []
    for seed in (1, 2):
        trainer = PPOTrainer(
            make_config(environment=game, rewards=(), seed=seed, max_turns=2, max_new_tokens=3, top_k=20)
        )
        folder = trainer.save(tmp_path / f"run-{seed}")
        (folder / "metrics.jsonl").write_text('{"step": 1, "avg_reward": 0.0}\n')
        trainer.config.to_yaml(folder / "config.yaml")
        folders.append(str(folder))
    (tmp_path / "held_out.txt").write_text("\n".join(asked))
    words = ["compare", *folders, "--data", str(tmp_path / "held_out.txt"), "--out", str(tmp_path / "c.html")]
    with pytest.raises(SystemExit):
        main(words)
    assert f"add --environment '1.0*{game}" in capsys.readouterr().err
    main([*words, "--environment", game])
    assert "Win rates by rewards" in capsys.readouterr().out
    data = json.loads((tmp_path / "c.html").read_text().split('id="data">')[1].split("</script>")[0])
    seen = [[re.findall(r" \[\d\d\]", text) for text in row["answers"].values()] for row in data["texts"]]
    assert [row["prompt"] for row in data["texts"]] == asked
    assert all(one == other != [] for one, other in seen)
    assert len({str(each) for each in seen}) == len(asked)


def test_a_reward_adapter_does_not_judge_another_base(trained, tmp_path):
    PPOTrainer(PPOConfig.from_yaml(trained / "seed-0" / "config.yaml")).models.value.save(tmp_path / "judge")
    folders = [trained / "seed-0", trained / "llama"]
    with pytest.raises(ValueError, match="belongs to one base model and the runs have 2"):
        compare_runs(folders, None, lambda tokenizer: ["a"], rewards=[RewardSpec(str(tmp_path / "judge"))])


def test_eval_has_every_measure_and_judge(trained, capsys):
    main(
        [
            *(
                "eval",
                str(trained / "seed-0"),
                "--data",
                str(trained / "held_out.txt"),
                "--show",
                "0",
                *OWN_REWARD,
            ),
            *(
                "--judges",
                "tests.pages.test_comparison:longer",
                "tests.pages.test_comparison:fails",
                "length_band,low=1,high=3",
            ),
        ]
    )
    shown = capsys.readouterr().out
    results = json.loads((trained / "seed-0" / "evaluation.json").read_text())
    texts = [(sample["policy"], sample["reference"]) for sample in results["samples"]]
    wins = [(len(a) > len(b)) + 0.5 * (len(a) == len(b)) for a, b in texts]
    assert results["win_rates"]["longer"]["rate"] == pytest.approx(sum(wins) / 5)
    assert set(results["win_rates"]) == {"longer", "fails", "length_band"}
    differ = sum(a != b for a, b in texts)
    assert differ > 0
    assert f"{differ} prompts could not be judged by fails and were left out" in shown
    for side in ("policy", "reference"):
        measured = results[side]
        assert measured["reward_low"] <= measured["avg_reward"] <= measured["reward_high"]
        assert {"distinct_1", "distinct_2", "repetition", "kl", "eos_rate"} <= set(measured)
    for label in ("Win rate by judge: longer", "Distinct words (distinct-1)", "Repeated 4-grams"):
        assert label in shown


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_hostile_text_is_only_text_on_the_page(folders, tmp_path):
    result = compare_runs(folders)
    names = ["one-0", HOSTILE]
    result["win_rates"] = {
        HOSTILE: [{"ours": "one-0", "theirs": HOSTILE, "rate": 0.6, "low": 0.5, "high": NAN, "prompts": 3}]
    }
    result["texts"] = [{"prompt": HOSTILE, "answers": {"one-0": HOSTILE, HOSTILE: "x" * 100_000}}]
    result["problems"] = [HOSTILE]
    page = write_page(tmp_path / "page.html", result, names)
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        "--virtual-time-budget=3000",
    ]
    done = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "<title>taken" not in done
    assert '<b id="taken"' not in done
    assert done.count('class="chart-line') > 10
    assert "Held-out reward against KL" in done
