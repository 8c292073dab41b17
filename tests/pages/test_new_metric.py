"""One declaration is all that a new metric needs: logged by a step, it is on every page with its title, unit
and meaning. A name without a declaration is refused; old runs that hold one still open."""

import json

import httpx
import numpy
import pytest
import torch

from proxima import Run
from proxima.cli.eval_command import table
from proxima.pages.comparison import compare_runs
from proxima.pages.report import write_report
from proxima.pages.studio import Library, make_studio_app
from proxima.pages.web import Site, running
from proxima.ppo_trainer import PPOTrainer
from proxima.runs.glossary import GLOSSARY, Metric, declare
from tests.fake_run import write_run
from tools.reference.metrics import metrics_page

READING = Metric(
    "reading_ease",
    title="Reading ease",
    unit="Flesch score",
    group="responses",
    compared=True,
    meaning="Mean Flesch reading ease of the step's responses.",
    healthy="It stays where it was.",
    otherwise="Falling: the responses become hard to read; raise `kl_coef`.",
)


class ReadingTrainer(PPOTrainer):
    """A trainer that logs one number more."""

    logged = ("reading_ease",)

    def ppo_step(self, prompts, next_prompts=None):
        outcome = super().ppo_step(prompts, next_prompts)
        return outcome | dict.fromkeys(self.logged, 60.0 + self.step)


@pytest.fixture
def declared(monkeypatch):
    monkeypatch.setitem(GLOSSARY, READING.name, READING)  # so that it goes again after the test
    del GLOSSARY[READING.name]
    declare(READING)


@pytest.fixture
def config(make_config):
    return lambda name: make_config(batch_size=2, run_name=name, checkpoint_every=0, token_samples=0)


def data_of(page):
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


def studio(folder, *paths):
    site = Site()
    with (
        running(make_studio_app(Library(folder), site), site),
        httpx.Client(base_url=site.address, timeout=60) as client,
    ):
        client.get(site.url)
        return [client.get(f"/api/{path}").raise_for_status().json() for path in paths]


def test_a_new_metric_is_declared_once_and_shown_everywhere(declared, config, tmp_path):
    for name in ("one", "two"):
        ReadingTrainer(config(name)).train(["a", "b"], num_epochs=2)
    runs = [tmp_path / "runs" / name for name in ("one", "two")]
    wanted = ("Reading ease", "Flesch score", READING.meaning)

    [chart] = [
        each
        for each in data_of(write_report(Run(runs[0])).read_text())["charts"]
        if each["title"] == wanted[0]
    ]
    assert (chart["title"], chart["y"], chart["note"]) == wanted
    assert [point[1] for point in chart["series"][0]["points"]] == [61.0, 62.0]

    compare_runs(runs, tmp_path / "page.html")
    [chart] = [
        each for each in data_of((tmp_path / "page.html").read_text())["charts"] if each["title"] == wanted[0]
    ]
    assert (chart["title"], chart["y"], chart["about"][0]["meaning"]) == wanted
    assert [one["name"] for one in chart["series"]] == ["one", "two"]

    run, compared = studio(tmp_path / "runs", "run?name=one", "compare?name=one&name=two")
    [chart] = [
        each for group in run["groups"] for each in group["charts"] if each["names"] == ["reading_ease"]
    ]
    assert (chart["title"], chart["unit"], chart["about"][0]["meaning"]) == wanted
    [chart] = [each for each in compared["charts"] if each["title"] == wanted[0]]
    assert (chart["title"], chart["y"], chart["about"][0]["meaning"]) == wanted

    assert f"### `reading_ease`\n\n*{wanted[0]}, {wanted[1]}.* {wanted[2]}" in metrics_page()


def test_a_new_held_out_metric_is_in_the_table_of_eval(monkeypatch):
    sides = {
        side: {"reading_ease": number, "failed_rewards": 0}
        for side, number in (("reference", 7.0), ("policy", 9.0))
    }
    rate = {"rate": 0.5, "low": 0.4, "high": 0.6, "prompts": 3}
    results = {"prompts": 3, **sides, "win_rate": rate, "win_rates": {}}
    assert "Reading" not in table(results)
    monkeypatch.setitem(
        GLOSSARY,
        "validation/reading_ease",
        Metric("validation/reading_ease", "Reading ease", "score", "responses", "M."),
    )
    [row] = [line for line in table(results).splitlines() if line.startswith("Reading ease (score)")]
    assert row.split()[-2:] == ["7", "9"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "reading_ease",
            r"'reading_ease' is not declared\. Declare it in proxima/runs/metric_declarations\.py",
        ),
        ("avg_rewards", "'avg_rewards' is not declared; did you mean 'avg_reward'"),
        ("validation/mine", "log it as 'validation/custom/mine'"),
    ],
)
def test_logging_an_undeclared_metric_stops_the_run(config, name, words):
    trainer = ReadingTrainer(config("one"))
    trainer.logged = (name,)
    with pytest.raises(ValueError, match=words):
        trainer.train(["a", "b"])
    assert Run(trainer.config.run_dir + "/one").metrics()["step"] == []


@pytest.mark.parametrize("kind", [float, int, numpy.float32, numpy.int64, torch.tensor])
def test_numbers_of_every_kind_are_logged_and_results_are_not(config, kind):
    class Trainer(PPOTrainer):
        def ppo_step(self, prompts, next_prompts=None):
            outcome = super().ppo_step(prompts, next_prompts)
            return outcome | {"custom/mine": kind(3), "notes": ["kept"], "label": "kept"}

    results = Trainer(config("one")).train(["a", "b"])
    metrics = Run(results.run_folder).metrics()
    assert metrics["custom/mine"] == [3.0]
    assert not {"notes", "label"} & set(metrics)


def test_metrics_of_ones_own_are_drawn(declared, config):
    trainer = ReadingTrainer(config("one"))
    trainer.logged = ("reading_ease", "custom/mine", "seconds/mine", "validation/custom/mine")
    folder = trainer.train(["a", "b"], num_epochs=2).run_folder
    charts = {one["title"]: one for one in data_of(write_report(Run(folder)).read_text())["charts"]}
    assert charts["Reading ease"]["y"] == "Flesch score"
    assert charts["Custom: mine"]["series"][0]["name"] == "custom/mine"
    assert charts["Held-out custom: mine"]["series"][0]["name"] == "validation/custom/mine"
    assert "seconds/mine" in [one["name"] for one in charts["Time per phase"]["series"]]


def test_old_runs_with_unknown_names_open(tmp_path):
    folders = [write_run(tmp_path / name, 12) for name in ("one", "two")]
    for folder in folders:
        path = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**line, "old_name": line["step"] ** 2}) + "\n" for line in lines))
    charts = {one["title"]: one for one in data_of(write_report(Run(folders[0])).read_text())["charts"]}
    assert charts["old_name"]["series"][0]["points"][2] == [3, 9]
    assert compare_runs(folders)["rows"]
    run, compared = studio(tmp_path, "run?name=one", "compare?name=one&name=two&metric=old_name")
    assert run["groups"][-1]["title"] == "Other metrics"
    assert run["groups"][-1]["charts"][0]["names"] == ["old_name"]
    assert compared["charts"][-1]["title"] == "old_name"
