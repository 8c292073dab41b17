"""Supervised fine-tuning and reward-model training, on small data made here."""

import json
import math
from collections.abc import Sequence

import pytest
import torch

from proxima.cli import main
from proxima.config import FinetuningConfig, PPOConfig
from proxima.finetuning import Demonstration, Preference, Rating, RatingTrainer, RewardTrainer, SFTTrainer
from proxima.finetuning.rating_trainer import order_accuracy
from proxima.finetuning.reward_trainer import calibration_error
from proxima.models import Backbone
from proxima.models.reward_model import REPORT_FILE, reward_warning
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import Run
from proxima.runtime.engine import Decoder, generation

DEMONSTRATIONS = [Demonstration(f"say {letter}:", f" {letter * 4}") for letter in "abcdefgh"] * 6
PREFERENCES = [Preference(f"prompt {i}", " yes" + "!" * (i % 3), " no" + "!" * (i % 4)) for i in range(60)]


@pytest.fixture
def finetuning(tiny, tmp_path):
    def make(**settings) -> FinetuningConfig:
        base = {
            "model_name": tiny,
            "learning_rate": 1e-2,
            "batch_size": 8,
            "lora_dropout": 0.0,
            "eval_every": 5,
            "run_dir": str(tmp_path),
        }
        return FinetuningConfig(**{**base, **settings})

    return make


@pytest.mark.parametrize("way", [{}, {"lora_r": 0, "learning_rate": 3e-3}], ids=["lora", "full"])
def test_sft_learns_its_demonstrations_and_ppo_starts_from_them(finetuning, way):
    results = SFTTrainer(finetuning(epochs=6, **way)).train(DEMONSTRATIONS)
    losses = [row["validation_loss"] for row in results.metrics]
    assert losses[-1] < losses[0] / 3
    assert results.best["validation_loss"] == min(losses)
    folder = str(results.folder)
    names = (
        {"sft_adapter": folder, "model_name": finetuning().model_name} if not way else {"model_name": folder}
    )
    config = PPOConfig(**names, max_new_tokens=5, top_k=1, rewards=lambda prompts, texts: [0.0] * len(texts))
    trainer = PPOTrainer(config)
    texts = trainer.generator.generate([f"say {letter}:" for letter in "abcd"])[0]
    assert sum(text == f" {letter * 4}" for text, letter in zip(texts, "abcd", strict=True)) >= 3


@pytest.mark.parametrize("way", [{}, {"lora_r": 0, "learning_rate": 3e-3}], ids=["lora", "full"])
def test_a_reward_model_learns_preferences_is_centred_and_can_be_used(finetuning, way):
    centre = [Demonstration("prompt 1", " yes"), Demonstration("prompt 2", " no")]
    trainer = RewardTrainer(finetuning(epochs=4, **way), centre_on=centre)
    results = trainer.train(PREFERENCES)
    assert results.best["accuracy"] == 1.0
    config = PPOConfig(finetuning().model_name, max_new_tokens=3, rewards=str(results.folder))
    ppo = PPOTrainer(config)
    assert ppo.models.reward.source == str(results.folder)
    encoded = [trainer.encode(Preference(item.prompt, item.completion, " no"))[0] for item in centre]
    ids = [torch.tensor([prompt + response]) for prompt, response in encoded]
    with torch.no_grad():
        scores = [float(ppo.models.reward.scores(row, torch.ones_like(row, dtype=torch.bool))) for row in ids]
    assert sum(scores) == pytest.approx(0, abs=1e-3)
    assert scores[0] > 1 > -1 > scores[1]
    assert torch.equal(
        ppo.models.value.head.weight.detach(), ppo.models.reward.head.weight.detach()
    )  # value starts there
    assert ppo.ppo_step(["prompt 3", "prompt 4"])["value_loss"] >= 0


def test_a_reward_model_near_chance_or_without_a_report_says_so(finetuning, tmp_path):
    folder = RewardTrainer(finetuning()).train(PREFERENCES).folder
    assert reward_warning(str(folder)) == ""
    (folder / REPORT_FILE).write_text(json.dumps({"accuracy": 0.51}))
    with pytest.warns(UserWarning, match=r"near chance: 0\.510"):
        PPOTrainer(PPOConfig(finetuning().model_name, rewards=str(folder)))
    (folder / REPORT_FILE).unlink()
    with pytest.warns(UserWarning, match="nothing is known of its held-out accuracy"):
        PPOTrainer(PPOConfig(finetuning().model_name, rewards=str(folder)))


def test_the_reward_adapter_starts_as_a_copy_of_the_sft_adapter(finetuning, tmp_path):
    sft = SFTTrainer(finetuning(run_name="sft", epochs=2)).train(DEMONSTRATIONS).folder
    trainer = RewardTrainer(finetuning(sft_adapter=str(sft)))
    adapters = [trainer.backbone.adapter_parameters(name) for name in ("sft", "reward")]
    assert all(torch.equal(left, right) for left, right in zip(*adapters, strict=True))
    before = [parameter.clone() for parameter in adapters[0]]
    trainer.train(PREFERENCES)
    assert all(torch.equal(left, right) for left, right in zip(before, adapters[0], strict=True))
    assert not all(torch.equal(left, right) for left, right in zip(*adapters, strict=True))


def test_micro_batches_do_not_change_training_and_the_same_seed_gives_the_same_bits(finetuning):
    finals = []
    for micro in (8, 8, 3):
        trainer = SFTTrainer(finetuning(micro_batch_size=micro))
        trainer.train(DEMONSTRATIONS)
        finals.append(torch.cat([parameter.detach().flatten() for parameter in trainer.role.parameters()]))
    assert torch.equal(finals[0], finals[1])
    assert torch.allclose(finals[0], finals[2], atol=1e-3)


@pytest.mark.parametrize("trainer", [SFTTrainer, RewardTrainer])
def test_the_fast_path_trains_and_measures_as_the_reference_path_in_passes_of_few_tokens(
    finetuning, trainer, monkeypatch
):
    examples = (DEMONSTRATIONS if trainer is SFTTrainer else PREFERENCES)[:12]
    measured, calls = [], []
    forward = Decoder.hidden
    monkeypatch.setattr(Decoder, "hidden", lambda *given: calls.append(given[2].total) or forward(*given))
    for fast, tokens in ((True, 10**6), (True, 40), (False, 10**6)):
        made = trainer(finetuning(epochs=2, lora_dropout=0.0, batch_size=4))
        made.backbone.settings.fast = fast
        made.passes.tokens = tokens
        calls.clear()
        measured.append([row["validation_loss"] for row in made.train(examples, examples[:4]).metrics])
        assert bool(calls) == fast
        if tokens == 40:
            longest = max(made.tokens(made.encode(one)) for one in examples)
            assert max(calls) <= max(tokens, longest)
    assert measured[1] == pytest.approx(measured[0], rel=1e-4)
    assert measured[2] == pytest.approx(measured[0], rel=1e-4)


def test_patience_stops_and_the_best_weights_are_kept(finetuning):
    trainer = SFTTrainer(
        finetuning(epochs=40, learning_rate=0.5, eval_every=2, patience=3, lr_schedule="constant")
    )
    results = trainer.train(DEMONSTRATIONS[8:], DEMONSTRATIONS[:8])
    assert "has not improved in 3 evaluations" in results.stop_reason
    kept = trainer._measure([trainer.encode(item) for item in DEMONSTRATIONS[:8]], 0)["validation_loss"]
    assert kept == results.best["validation_loss"] < results.metrics[-1]["validation_loss"]


CHANGES = {
    "lora_alpha": 64,
    "quantize": "nf4",
    "lora_dropout": 0.5,
    "lora_targets": "q_proj",
    "learning_rate": 1e-3,
    "batch_size": 4,
    "epochs": 2,
    "warmup_share": 0.9,
    "lr_schedule": "constant",
    "weight_decay": 5.0,
    "max_grad_norm": 1e-3,
    "validation_share": 0.5,
    "seed": 1,
}


@pytest.fixture(scope="module")
def plain():
    return {}


@pytest.mark.parametrize("name", CHANGES)
def test_every_setting_of_fine_tuning_changes_the_outcome(finetuning, plain, name):
    def outcome(**settings):
        return SFTTrainer(finetuning(**settings)).train(DEMONSTRATIONS).metrics[-1]

    if not plain:
        plain.update(outcome())
    assert outcome(**{name: CHANGES[name]}) != plain


@pytest.mark.parametrize(
    ("prompts", "each", "held_out"), [(40, 1, 2), (8, 5, 5), (20, 2, 2), (2, 30, 0), (1, 3, 0)]
)
def test_whole_prompts_are_held_out(finetuning, recwarn, prompts, each, held_out):
    """Else the held-out accuracy is partly that of memory; where a prompt has too many examples, it says so."""
    pairs = [Preference(f"prompt {i}", f" yes {j}", " no") for i in range(prompts) for j in range(each)]
    trainer = RewardTrainer(finetuning())
    order, places = trainer.split(pairs)
    assert sorted([*order, *places]) == list(range(len(pairs)))
    shared = {pairs[i].prompt for i in order} & {pairs[i].prompt for i in places}
    if held_out:
        assert not shared
        assert len(places) == held_out
        assert not recwarn.list
    else:
        assert len(places) == max(1, len(pairs) // 20)
        assert "give --validation" in str(recwarn.pop(UserWarning).message)
    if each == 1:  # as any examples are split
        plain = trainer.shuffled(len(pairs))
        assert [*places, *order] == list(plain)


def test_training_that_continues_holds_out_what_was_held_out_and_new_prompts(finetuning):
    """The weights it starts from have learned the other pairs."""
    first, again = RewardTrainer(finetuning()), RewardTrainer(finetuning(seed=7))
    earlier = [Preference(f"prompt {i}", " yes", " no") for i in range(60)]
    _, before = first.split(earlier)
    again.new_examples, again.held_out_before = 40, first.held_out
    new = [Preference(f"new {i}", " yes", " no") for i in range(38)]
    pairs = [*new, *earlier[:2], *earlier]  # two new pairs have prompts that were trained on
    order, places = again.split(pairs)
    assert sorted([*order, *places]) == list(range(len(pairs)))
    held_out = {pairs[i].prompt for i in places}
    assert {earlier[i].prompt for i in before} == {prompt for prompt in held_out if prompt[0] == "p"}
    assert len(held_out) == 3 + 2


def test_long_examples_are_left_out_and_counted(finetuning):
    data = [*DEMONSTRATIONS, Demonstration("long", " x" * 200)]
    assert SFTTrainer(finetuning(max_length=40)).train(data, DEMONSTRATIONS[:4]).left_out == 1
    with pytest.raises(ValueError, match=r"no example fits max_length \(2 tokens\)"):
        SFTTrainer(finetuning(max_length=2)).train(data)


def test_calibration_error_by_hand():
    certain = torch.full((100,), 20.0)
    assert calibration_error(certain) == pytest.approx(0, abs=1e-4)
    assert calibration_error(torch.cat([certain[:50], -certain[:50]])) == pytest.approx(0.5, abs=1e-4)
    honest = torch.tensor([1.0986] * 75 + [-1.0986] * 25)  # 75 % confident, 75 % right
    assert calibration_error(honest) == pytest.approx(0, abs=1e-3)


def test_sft_reward_and_train_from_the_command_line(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demos.jsonl").write_text("".join(json.dumps(vars(item)) + "\n" for item in DEMONSTRATIONS))
    (tmp_path / "prefs.jsonl").write_text("".join(json.dumps(vars(item)) + "\n" for item in PREFERENCES))
    (tmp_path / "prompts.txt").write_text("prompt one\nprompt two\n")
    common = ["--model-name", tiny, "--run-name"]
    main(["sft", "--data", "demos.jsonl", *common, "sft"])
    main(
        [
            "reward",
            "--data",
            "prefs.jsonl",
            "--sft-adapter",
            "runs/sft",
            "--demonstrations",
            "demos.jsonl",
            *common,
            "rm",
        ]
    )
    main(
        [
            "train",
            "--data",
            "prompts.txt",
            "--sft-adapter",
            "runs/sft",
            "--rewards",
            "runs/rm",
            *common,
            "ppo",
        ]
    )
    shown = capsys.readouterr().out
    assert "validation loss" in shown
    assert "held-out accuracy" in shown
    assert "all epochs done" in shown
    assert (tmp_path / "runs" / "ppo" / "policy" / "adapter_model.safetensors").is_file()


# --- data that is read when needed ---


class OnDisk(Sequence):
    """Examples that may be asked for, a few at a time, but never all at once."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        assert not isinstance(index, slice) or len(self.items[index]) <= 16
        return self.items[index]

    def __iter__(self):
        raise AssertionError("all examples were read at once")


@pytest.mark.parametrize(
    ("trainer", "examples"), [(SFTTrainer, DEMONSTRATIONS), (RewardTrainer, PREFERENCES)]
)
def test_examples_are_read_when_their_batch_is_due_and_training_is_the_same(finetuning, trainer, examples):
    settings = finetuning(epochs=2, max_length=20)
    assert trainer(settings).train(OnDisk(examples)).metrics == trainer(settings).train(examples).metrics


# --- ratings ---

WORDS = ("bad", "poor", "fair", "good", "best")
RATINGS = [
    Rating(f"prompt {i % 7}", f" {WORDS[i % 5]}" + "!" * (i % 3), 10.0 * (i % 5) + 100) for i in range(120)
]


def test_a_reward_model_learns_ratings_and_ppo_uses_its_folder(finetuning):
    trainer = RatingTrainer(finetuning(epochs=8))
    results = trainer.train(RATINGS)
    assert results.best["accuracy"] > 0.9
    assert results.best["validation_loss"] < 0.3  # of unit variance
    report = json.loads((results.folder / REPORT_FILE).read_text())
    assert report["accuracy"] == results.best["accuracy"]
    assert report["rating_mean"] == pytest.approx(120, abs=2)
    assert report["rating_deviation"] == pytest.approx(14.1, abs=1)
    assert reward_warning(str(results.folder)) == ""
    ppo = PPOTrainer(PPOConfig(finetuning().model_name, max_new_tokens=3, rewards=str(results.folder)))
    encoded = [trainer.encode(Rating("prompt 1", f" {word}", 0))[0] for word in WORDS]
    rows = [torch.tensor([prompt + response]) for prompt, response in encoded]
    with torch.no_grad():
        scores = [
            float(ppo.models.reward.scores(row, torch.ones_like(row, dtype=torch.bool))) for row in rows
        ]
    assert scores == sorted(scores)
    with torch.no_grad():
        sampled = trainer.all_scores(trainer.samples.rows)
    assert float(sampled.mean()) == pytest.approx(0, abs=1e-4)
    assert float(sampled.std(unbiased=False)) == pytest.approx(1, abs=1e-4)
    assert ppo.models.reward.source == str(results.folder)
    assert math.isfinite(ppo.ppo_step(["prompt 3"])["avg_reward"])


def test_order_accuracy_by_hand():
    ratings = torch.tensor([1.0, 2.0, 2.0, 3.0])
    assert order_accuracy(torch.tensor([0.0, 5.0, 6.0, 9.0]), ratings) == 1
    assert order_accuracy(torch.tensor([9.0, 5.0, 6.0, 0.0]), ratings) == 0
    assert order_accuracy(torch.tensor([0.0, 0.0, 6.0, 9.0]), ratings) == pytest.approx(
        4 / 5
    )  # a tie is not right
    assert math.isnan(order_accuracy(torch.zeros(3), torch.ones(3)))


def test_ratings_that_are_all_the_same_are_refused(finetuning):
    with pytest.raises(ValueError, match="all 2 ratings are 3; a reward model needs ratings that differ"):
        RatingTrainer(finetuning()).train([Rating("a", "b", 3), Rating("a", "c", 3), Rating("a", "d", 3)])
    with pytest.raises(ValueError, match="held-out ratings are all the same"):
        RatingTrainer(finetuning()).train(RATINGS, RATINGS[:1])


def test_proxima_reward_takes_ratings_by_their_columns(finetuning, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ratings.csv").write_text(
        "question,answer,rating\n" + "".join(f"q{i},{'x' * i},{i}\n" for i in range(1, 40))
    )
    main(["reward", "--data", "ratings.csv", "--model-name", tiny, "--run-name", "rm", "--limit", "30"])
    shown = capsys.readouterr().out
    assert "trained on ratings" in shown
    assert "held-out accuracy" in shown
    assert PPOTrainer(PPOConfig(tiny, rewards="runs/rm")).models.reward.source == "runs/rm"


def test_a_run_is_never_written_over_and_an_unfinished_one_leaves_no_folder(
    finetuning, tmp_path, monkeypatch
):
    first = RewardTrainer(finetuning(run_name="mine")).train(PREFERENCES).folder
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    trainer = SFTTrainer(finetuning(run_name="mine"))
    monkeypatch.setattr(trainer, "_fit", lambda *given: pytest.fail("trained before it looked"))
    with pytest.raises(ValueError, match="already holds a run"):
        trainer.train(DEMONSTRATIONS)
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before

    def stopped(*given):
        assert (tmp_path / "other").is_dir()
        raise KeyboardInterrupt

    trainer = SFTTrainer(finetuning(run_name="other"))
    monkeypatch.setattr(trainer, "_fit", stopped)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(DEMONSTRATIONS)
    assert not (tmp_path / "other").exists()


class Spoilt(RewardTrainer):
    """Some batches have a loss that is not a number."""

    bad = 0

    def loss(self, rows):
        found = super().loss(rows)
        if torch.is_grad_enabled() and self.bad:
            self.bad -= 1
            return found * math.nan
        return found


def test_an_update_that_is_not_finite_is_skipped_and_counted(finetuning):
    trainer = Spoilt(finetuning(epochs=4))
    trainer.bad = 3
    results = trainer.train(PREFERENCES)
    assert results.metrics[-1]["skipped_updates"] == 3
    assert all(parameter.isfinite().all() for parameter in trainer.role.parameters())
    assert results.best["accuracy"] == 1.0


def test_training_that_diverges_says_so_and_writes_no_weights(finetuning, tmp_path, monkeypatch):
    trainer = Spoilt(finetuning(epochs=4, run_name="spoilt"))
    trainer.bad = 10**6
    with pytest.raises(ValueError, match="10 updates had a gradient that is not finite; lower learning_rate"):
        trainer.train(PREFERENCES)
    assert not (tmp_path / "spoilt" / "reward.json").exists()
    assert Run(tmp_path / "spoilt").state == "stopped"  # its log and metrics stay, and its name is free again
    assert RewardTrainer(finetuning(run_name="spoilt")).train(PREFERENCES).folder == tmp_path / "spoilt"
    monkeypatch.setattr(
        RewardTrainer, "measure", lambda self, rows: {"validation_loss": math.nan, "accuracy": 0.0}
    )
    with pytest.raises(ValueError, match="validation_loss is not a number at step 5"):
        RewardTrainer(finetuning(run_name="nan")).train(PREFERENCES)


def test_the_old_name_of_the_results_still_works_and_warns():
    import proxima.finetuning as room

    with pytest.warns(DeprecationWarning, match="StageResults is now FinetuningResults"):
        assert room.StageResults is room.FinetuningResults


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "reference"])
@pytest.mark.parametrize("way", [{}, {"quantize": "nf4"}, {"lora_r": 0, "learning_rate": 3e-3}], ids=str)
@pytest.mark.parametrize("trainer", [SFTTrainer, RewardTrainer])
def test_checkpointing_and_few_tokens_per_pass_change_memory_alone(
    trainer, way, fast, finetuning, monkeypatch
):
    """Checkpointing: the same bits, with dropout too. Smaller passes: the same sums in another order."""
    examples = (DEMONSTRATIONS if trainer is SFTTrainer else PREFERENCES)[:12]
    if not fast:
        monkeypatch.setattr(Backbone, "known", False)
    found = []
    for settings in (
        {"lora_dropout": 0.3},
        {"lora_dropout": 0.3, "gradient_checkpointing": True},
        {},
        {"gradient_checkpointing": True, "micro_batch_tokens": 40},
    ):
        made = trainer(finetuning(epochs=2, batch_size=4, **{"lora_dropout": 0.0, **way, **settings}))
        assert (made.backbone.decoder is not None) == fast
        assert made.passes.chunk == (5 if "quantize" in way and "micro_batch_tokens" in settings else None)
        found.append(made.train(examples, examples[:4]).metrics)
    assert found[1] == found[0]
    for one, other in zip(found[3], found[2], strict=True):
        assert one == pytest.approx(other, rel=2e-4, abs=2e-5)


@pytest.mark.parametrize("known", [True, False], ids=["fast", "reference"])
def test_checkpointing_keeps_few_numbers_for_the_backward_pass(finetuning, known, monkeypatch):
    monkeypatch.setattr(Backbone, "known", known)
    kept = []
    for on in (False, True):
        made = SFTTrainer(finetuning(gradient_checkpointing=on))
        rows, sizes = [made.encode(one) for one in DEMONSTRATIONS[:8]], []

        def note(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        with made.role.training(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            made.loss(rows)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize("trainer", [SFTTrainer, RewardTrainer])
def test_out_of_memory_halves_the_passes_of_training_and_of_evaluation(trainer, finetuning, monkeypatch):
    """As in PPO; what is learned stays."""
    examples = (DEMONSTRATIONS if trainer is SFTTrainer else PREFERENCES)[:12]
    whole = trainer(finetuning(epochs=2, batch_size=4)).train(examples, examples[:8]).metrics
    forward, most = Decoder.hidden, [10**6]

    def limited(*given):
        if given[2].total > most[0]:
            raise torch.cuda.OutOfMemoryError("made up")
        return forward(*given)

    monkeypatch.setattr(Decoder, "hidden", limited)
    made = trainer(finetuning(epochs=2, batch_size=4))
    most[0] = max(made.tokens(made.encode(one)) for one in examples)
    halved = made.train(examples, examples[:8]).metrics
    assert made.passes.size < 4
    for one, other in zip(halved, whole, strict=True):
        assert one == pytest.approx(other, rel=2e-4, abs=2e-5)


def test_out_of_memory_while_answers_are_sampled_halves_the_slots(finetuning, monkeypatch):
    made, most = RewardTrainer(finetuning(epochs=1)), [10**6]
    make = generation.new_slots

    def limited(count, *given):
        if count > 8:
            most.append(count)
            raise torch.cuda.OutOfMemoryError("made up")
        return make(count, *given)

    monkeypatch.setattr(generation, "new_slots", limited)
    made.train(PREFERENCES)
    assert len(most) > 1
    assert made.passes.sampling.slots(64) <= 8
    assert made.samples is not None
    assert len(made.samples.rows) > 8
