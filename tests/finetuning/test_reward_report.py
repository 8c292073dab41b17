"""What `proxima reward` reports, by hand; and a line for each kind of data that teaches nothing or little."""

import json
import math
from dataclasses import replace

import pytest
import torch

from proxima.cli import main
from proxima.config import PPOConfig, RewardConfig
from proxima.finetuning import LearningCurve, Preference, RewardTrainer, reward_trainer
from proxima.finetuning.held_out_prompts import prompt_key
from proxima.finetuning.reward_report import (
    Before,
    HeldOutPairs,
    PairFacts,
    length_accuracy,
    lines,
    report,
)
from proxima.models.reward_model import REPORT_FILE
from proxima.ppo_trainer import PPOTrainer

PAIRS = HeldOutPairs(
    margins=torch.tensor([2.0, -0.1, 0.3, 5.0]),
    margins_elsewhere=torch.tensor([1.0, -1.0, -1.0, math.nan]),
    lengths=torch.tensor([[10, 20], [20, 10], [10, 10], [100, 99]]),
    likelihoods=torch.tensor([-1.0, -5.0, -2.0, -6.0]),
    longer_wins=False,
)


def test_the_report_by_hand():
    found = report(PAIRS)
    assert found["pairs"] == 4
    assert found["by_length"]["chosen is shorter"] == {"pairs": 1, "accuracy": 1.0}
    assert found["by_length"]["chosen is longer"] == {"pairs": 1, "accuracy": 0.0}
    assert found["by_length"]["similar"] == {"pairs": 2, "accuracy": 1.0}
    assert found["by_confidence"]["0.5 to 0.6"]["accuracy"] == 0.5  # margins -0.1 and 0.3
    assert found["by_confidence"]["0.9 to 1"] == pytest.approx(
        {"pairs": 1, "accuracy": 1.0, "confidence": 1 / (1 + math.exp(-5))}
    )
    assert found["by_likelihood"]["likely to the base"]["pairs"] == 3  # the median is one of them
    assert found["by_likelihood"]["unlikely to the base"] == {"pairs": 1, "accuracy": 1.0}
    assert found["baselines"] == pytest.approx(
        {
            "length_alone": (1 + 0 + 0.5 + 0) / 4,
            "prompt_alone": 0.5,
            "another_prompt": 1 / 3,
            "another_prompt_pairs": 3,
        }
    )
    assert sum(part["pairs"] for part in found["by_confidence"].values()) == 4


def test_pairs_without_a_likelihood_are_in_neither_half():
    likelihoods = torch.tensor([-1.0, math.nan, -2.0, -6.0])
    found = report(replace(PAIRS, likelihoods=likelihoods))["by_likelihood"]
    assert {name: part["pairs"] for name, part in found.items()} == {
        "likely to the base": 2,
        "unlikely to the base": 1,
    }


def test_a_model_that_is_no_better_than_length_or_ignores_the_prompt_is_told():
    sure = torch.full((400,), 2.0)
    lengths = torch.tensor([[20, 10]] * 400)
    told = lines(1.0, report(HeldOutPairs(sure, sure, lengths, -torch.arange(400.0), True)))
    assert "the model is not clearly better than the length of the answers alone" in told
    assert "the model hardly reads the prompt: its accuracy is the same with another one" in told
    other = lines(1.0, report(HeldOutPairs(sure, -sure, lengths.flip(1), -torch.arange(400.0), True)))
    assert not any("not clearly" in line or "hardly" in line for line in other)
    assert any("measured on 4 pairs" in line for line in lines(0.75, report(PAIRS)))
    right = torch.where(torch.arange(400) % 10 < 7, 2.0, -2.0)
    one_prompt = report(HeldOutPairs(right, right * math.nan, lengths.flip(1), -torch.arange(400.0), True))
    assert not any("hardly" in line for line in lines(0.7, one_prompt))  # no other prompt was tried


def test_the_report_of_training_that_continued_by_hand():
    before = Before(["new", "earlier", "new", "new"], torch.tensor([-1.0, 2.0, 3.0, -0.5]), -torch.ones(50))
    found = report(replace(PAIRS, before=before))
    assert found["by_source"] == {
        "new": {"pairs": 3, "accuracy": 1.0, "accuracy_before": pytest.approx(1 / 3)},
        "earlier": {"pairs": 1, "accuracy": 0.0, "accuracy_before": 1.0},
    }
    assert found["before_on_new_pairs"] == {"pairs": 50, "accuracy": 0.0}
    shown = "\n".join(lines(0.75, found))
    assert (
        "accuracy 0.000 on new pairs (50); held-out pairs: new 0.333, now 1.000 (3); earlier 1.000," in shown
    )
    assert "not clearly better than chance on the new pairs" in shown
    right = report(replace(PAIRS, before=replace(before, new_margins=torch.ones(50))))
    assert not any("better than chance" in line for line in lines(0.75, right))
    none = report(replace(PAIRS, before=replace(before, new_margins=torch.zeros(0))))
    assert "before this training: held-out pairs: new 0.333" in "\n".join(lines(0.75, none))
    assert before.of(torch.tensor([True, False, False, True])).sources == ["new", "new"]
    assert "by_source" not in report(PAIRS)


def test_a_model_that_continues_is_measured_on_new_pairs_before_it_learns_from_them(tiny, tmp_path):
    config = RewardConfig(
        tiny, learning_rate=0.02, batch_size=8, epochs=1, validation_share=0.25, lora_dropout=0.0,
        run_dir=str(tmp_path),
    )  # fmt: skip
    first, earlier = RewardTrainer(config), varied(24)
    folder = str(first.train(earlier).folder)
    new = [Preference(f"n {i}", pair.rejected, pair.chosen, tie=i < 4) for i, pair in enumerate(varied(20))]
    computer = PPOTrainer(PPOConfig(tiny, rewards=folder)).reward_computer

    def margins(pairs):
        prompts = [pair.prompt for pair in pairs]
        scores = (
            computer.compute_rewards(prompts, [getattr(pair, side) for pair in pairs])
            for side in ("chosen", "rejected")
        )
        return torch.tensor([a - b for a, b in zip(*scores, strict=True)])

    def go_on(validation=None):
        trainer = RewardTrainer(config)
        trainer.continued, trainer.new_examples = folder, len(new)
        trainer.held_out_before = first.held_out
        return trainer, trainer.train([*new, *earlier], validation)

    second, results = go_on()
    expected = margins(new[4:]) * first.unit.deviation
    assert torch.allclose(second.before.new_margins.sort().values, expected.sort().values, atol=1e-4)
    held_out = [pair for pair in [*new, *earlier] if prompt_key(pair.prompt) in second.held_out]
    old = [pair for pair in held_out if pair.prompt.startswith("p")]
    fresh = [pair for pair in held_out if pair.prompt.startswith("n") and not pair.tie]
    assert (len(old), len(held_out) - len(old)) == (6, 5)
    found = json.loads((results.folder / REPORT_FILE).read_text())["held_out"]
    for name, pairs in (("earlier", old), ("new", fresh)):
        assert found["by_source"][name]["pairs"] == len(pairs)
        share = float((margins(pairs) > 0).double().mean())
        assert found["by_source"][name]["accuracy_before"] == pytest.approx(share)
    assert found["before_on_new_pairs"]["pairs"] == 16
    assert "before this training: accuracy" in "\n".join(second.report_lines(results))
    third, _ = go_on(varied(6))
    assert list(third.held_out_report["by_source"]) == ["given"]
    assert third.held_out_report["before_on_new_pairs"] == found["before_on_new_pairs"]


def test_length_alone_counts_equal_lengths_half():
    lengths = torch.tensor([[3, 1], [2, 2]])
    assert length_accuracy(lengths, True) == 0.75
    assert length_accuracy(lengths, False) == 0.25


def test_the_gain_of_more_pairs_is_that_of_a_line_over_the_logarithm():
    curve = LearningCurve([(250, 0.60), (500, 0.65), (1000, 0.70)])
    assert curve.gain(1000) == pytest.approx(0.05)  # one more doubling
    assert "1,000 more should bring about 0.050" in str(curve)
    assert "too few to tell" in str(LearningCurve([(2, 0.5), (2, 0.5), (2, 1.0)]))


def test_a_learning_curve_of_ratings_or_of_a_continued_model_is_refused(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rated = [{"prompt": f"p {i}", "completion": " yes" + "!" * i, "rating": i} for i in range(12)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rated))
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(vars(item)) + "\n" for item in varied(24)))
    ask = ["reward", "--model-name", tiny, "--epochs", "1", "--validation-share", "0.2"]
    main([*ask, "--data", "p.jsonl", "--run-name", "rm"])
    for words, said in (
        (["--data", "r.jsonl"], "got ratings (r.jsonl)"),
        (["--data", "p.jsonl", "--continue", "runs/rm"], "got --continue runs/rm"),
    ):
        with pytest.raises(SystemExit):
            main([*ask, *words, "--learning-curve"])
        assert said in capsys.readouterr().err


def varied(count: int) -> list[Preference]:
    return [Preference(f"p {i}", " yes" + "!" * (i % 5), " no" + "?" * ((i + 2) % 5)) for i in range(count)]


def test_bad_pairs_get_a_line_each():
    with pytest.raises(ValueError, match="all 120 pairs are ties"):
        PairFacts.of([Preference("p", f"a{i}", "b", tie=True) for i in range(120)]).check()
    with pytest.warns(UserWarning, match="rejected answer is the same in all 120 pairs"):
        PairFacts.of([Preference("p", f"a{i}", "b") for i in range(120)]).check()
    with pytest.warns(UserWarning, match="chosen answer is the longer one in 100% of the pairs"):
        PairFacts.of([Preference("p", f"long{i}" * 2, f"b{i}") for i in range(120)]).check()
    with pytest.warns(UserWarning, match="20 pairs are few"):
        PairFacts.of(varied(20)).check()


def test_pairs_of_both_kinds_get_none(recwarn):
    PairFacts.of(varied(200)).check()
    assert not recwarn.list


def test_the_command_reports_and_writes_it(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(vars(item)) + "\n" for item in varied(60)))
    flags = ["--learning-rate", "0.01", "--epochs", "1", "--learning-curve", "--validation-share", "0.2"]
    main(["reward", "--data", "p.jsonl", "--model-name", tiny, "--run-name", "rm", *flags])
    shown = capsys.readouterr().out
    for part in ("accuracy by length", "accuracy by confidence", "length alone", "more should bring about"):
        assert part in shown
    report_file = json.loads((tmp_path / "runs" / "rm" / REPORT_FILE).read_text())
    assert report_file["held_out"]["pairs"] == 12
    assert [count for count, _ in report_file["learning_curve"]["points"]] == [12, 24, 48]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["rm"]


def test_likelihoods_are_those_of_the_model_before_training(tiny, tmp_path):
    config = RewardConfig(tiny, learning_rate=0.05, epochs=1, lora_r=0, run_dir=str(tmp_path))
    trainer = RewardTrainer(config)
    row = trainer.encode(varied(1)[0]).chosen
    with torch.no_grad():
        logits = trainer.backbone.network(torch.tensor([row[0] + row[1]])).logits[0].double()
    logs = logits[len(row[0]) - 1 : -1].log_softmax(-1)
    expected = sum(float(logs[i, token]) for i, token in enumerate(row[1])) / len(row[1])
    assert float(trainer.likelihoods([row], None)) == pytest.approx(expected, rel=1e-4)


def test_margins_are_those_of_the_best_weights_and_costly_figures_are_of_some_pairs(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(reward_trainer, "LOOKED_AT", 5)
    config = RewardConfig(
        tiny, learning_rate=0.01, batch_size=8, epochs=2, eval_every=1, run_dir=str(tmp_path)
    )
    trainer = RewardTrainer(config)
    monkeypatch.setattr(trainer, "_is_better", lambda measured, best: not best)
    held_out = [replace(pair, tie=i < 4) for i, pair in enumerate(varied(20))]
    results = trainer.train(varied(24), held_out)
    assert results.best["step"] == 1 < results.metrics[-1]["step"]
    with torch.no_grad():
        now = trainer.all_margins([trainer.encode(pair) for pair in held_out])
    torch.testing.assert_close(now * trainer.unit.deviation, trainer.held_out_margins, rtol=1e-4, atol=1e-5)
    found = trainer.held_out_report
    assert found["pairs"] == 16
    assert sum(part["pairs"] for part in found["by_likelihood"].values()) == 5
    assert found["baselines"]["another_prompt_pairs"] == 5
    assert "another prompt" in (line := trainer.report_lines(results)[2])
    assert "(5), the prompt alone" in line
