"""The terms of a reward model's loss against slow oracles in plain Python, and what they do in training."""

import math
import random

import pytest
import torch

from proxima.config import RewardConfig
from proxima.data import Demonstration
from proxima.finetuning import Preference, Rating, RatingTrainer, RewardTrainer
from proxima.finetuning.reward_defaults import with_defaults
from proxima.finetuning.reward_losses import mean_by_answer, preference_loss, score_penalty
from proxima.runs import score_metrics

PREFERENCES = [Preference(f"prompt {i}", " yes" + "!" * (i % 3), " no" + "!" * (i % 4)) for i in range(24)]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def oracle(difference: float, margin: float, tie: bool, smoothing: float) -> float:
    if tie:
        return -(log_sigmoid(difference) + log_sigmoid(-difference)) / 2
    d = difference - margin
    return -(1 - smoothing) * log_sigmoid(d) - smoothing * log_sigmoid(-d)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_the_preference_loss_is_its_formula(smoothing):
    rng = random.Random(0)
    rows = [(rng.gauss(0, 3), rng.choice([0.0, 0.5, 2.0]), rng.random() < 0.3) for _ in range(50)]
    columns = list(zip(*rows, strict=True))
    differences = torch.tensor(columns[0], dtype=torch.float64, requires_grad=True)
    found = preference_loss(
        differences, torch.tensor(columns[1], dtype=torch.float64), torch.tensor(columns[2]), smoothing
    )
    assert found.tolist() == pytest.approx([oracle(*row, smoothing) for row in rows], abs=1e-12)
    assert torch.autograd.gradcheck(
        lambda given: preference_loss(
            given, torch.tensor(columns[1], dtype=torch.float64), torch.tensor(columns[2]), smoothing
        ),
        differences,
    )


def test_without_smoothing_margin_and_ties_it_is_bradley_terry():
    differences = torch.linspace(-5, 5, 11, dtype=torch.float64)
    nothing = torch.zeros(11, dtype=torch.float64)
    found = preference_loss(differences, nothing, nothing.bool())
    assert torch.equal(found, -torch.nn.functional.logsigmoid(differences))


def test_a_tie_is_least_where_scores_are_equal_and_smoothing_where_the_odds_are_its_own():
    at = torch.linspace(-4, 4, 801, dtype=torch.float64)
    nothing = torch.zeros_like(at)
    tied = preference_loss(at, nothing, torch.ones_like(at).bool())
    assert float(at[tied.argmin()]) == pytest.approx(0, abs=1e-9)
    smoothed = preference_loss(at, nothing, nothing.bool(), 0.2)
    assert float(at[smoothed.argmin()]) == pytest.approx(math.log(4), abs=0.01)


def test_the_mean_by_answer_and_the_score_penalty_by_hand():
    losses = torch.tensor([1.0, 2.0, 6.0, 5.0, 10.0], dtype=torch.float64)
    assert mean_by_answer(losses, torch.tensor([3, 0, 2])).tolist() == [3.0, 0.0, 7.5]
    scores = torch.tensor([[1.0, -3.0], [0.0, 2.0]], dtype=torch.float64)
    assert score_penalty(scores).tolist() == [5.0, 2.0]


@pytest.fixture
def training(tiny, tmp_path):
    def make(**settings) -> RewardConfig:
        base = {
            "model_name": tiny,
            "learning_rate": 1e-2,
            "epochs": 1,
            "batch_size": 8,
            "lora_dropout": 0.0,
            "eval_every": 5,
            "run_dir": str(tmp_path),
        }
        return RewardConfig(**{**base, **settings})

    return make


@pytest.mark.parametrize("micro", [24, 5])
def test_the_loss_of_a_batch_is_the_sum_of_its_terms_by_separate_passes(training, micro):
    """The one pass that reads scores and tokens gives what `transformers` gives, one answer at a time."""
    terms = {"lm_coef": 0.3, "score_penalty": 0.05, "mismatch_coef": 0.7, "label_smoothing": 0.1}
    config = training(**terms, micro_batch_size=micro)
    trainer = RewardTrainer(config)
    trainer.role.head.bias.data += 0.7  # so that the penalty shows
    data = [*PREFERENCES[:4], Preference("p", " a", " bb", margin=0.5), Preference("p", " c", " d", tie=True)]
    data.append(Preference("p", "", " e", chosen_ended=False))  # an answer without a token
    expected = 0.0
    with torch.no_grad(), trainer.role.active():
        rows = trainer.with_mismatches([trainer.encode(item) for item in data])
        assert 0 < sum(row.mismatch is None for row in rows) < len(rows)  # prompts that are equal have none
        for row in rows:
            scores = []
            for is_chosen, (prompt, response) in enumerate((row.rejected, row.chosen)):
                output = trainer.backbone.network(
                    torch.tensor([prompt + response]), output_hidden_states=True
                )
                scores.append(float(trainer.role.head(output.hidden_states[-1][0, -1].float())))
                if is_chosen and not row.tie:
                    logs = output.logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
                    own = [-float(logs[i, token]) for i, token in enumerate(response)]
                    expected += 0.3 * sum(own) / max(len(own), 1)
            expected += oracle(scores[1] - scores[0], row.margin, row.tie, 0.1)
            expected += 0.05 * (scores[0] ** 2 + scores[1] ** 2) / 2
            if row.mismatch:
                ids = torch.tensor([[*row.mismatch[0], *row.mismatch[1]]])
                states = trainer.backbone.network(ids, output_hidden_states=True).hidden_states[-1]
                other = float(trainer.role.head(states[0, -1].float()))
                expected += 0.7 * oracle(scores[1] - other, 0.0, False, 0.0)
        found = sum(float(trainer.loss(rows[i : i + micro])) for i in range(0, len(rows), micro))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lm_coef", 0.0),
        ("score_penalty", 0.5),
        ("label_smoothing", 0.2),
        ("epochs", 2),
        ("ensemble", 2),
        ("mismatch_coef", 0.0),
    ],
)
def test_every_setting_of_reward_training_changes_the_outcome(training, name, value):
    def outcome(**settings):
        return RewardTrainer(training(**settings)).train(PREFERENCES).metrics[-1]["train_loss"]

    assert outcome(**{name: value}) != outcome()


@pytest.mark.parametrize(
    ("name", "value"), [("lm_coef", 0.0), ("score_penalty", 0.5), ("epochs", 2), ("ensemble", 2)]
)
def test_every_setting_of_training_on_ratings_changes_the_outcome(training, name, value):
    def outcome(**settings):
        return RatingTrainer(training(**settings)).train(RATINGS, RATINGS[:4]).metrics[-1]["train_loss"]

    assert outcome(**{name: value}) != outcome()


@pytest.mark.parametrize("given", [{"label_smoothing": 0.1}, {"mismatch_coef": 0.5}])
def test_what_only_pairs_have_is_refused_for_ratings(training, given):
    [(name, value)] = given.items()
    with pytest.raises(ValueError, match=rf"^{name} \({value}\) is for pairs, and these are ratings; leave"):
        RatingTrainer(training(**given))
    RatingTrainer(training(label_smoothing=0.0, mismatch_coef=0.0))


def test_the_penalty_of_a_rating_is_its_squared_score(training):
    losses = {}
    for coef in (0.0, 2.0):
        trainer = RatingTrainer(training(lm_coef=0.0, score_penalty=coef, ensemble=2))
        trainer.prepare(RATINGS, RATINGS)
        rows = [trainer.encode(item) for item in RATINGS[:3]]
        with torch.no_grad(), trainer.role.active():
            losses[coef] = float(trainer.loss(rows))
            scores = trainer.members([row for row, _ in rows])
    assert losses[2.0] - losses[0.0] == pytest.approx(2 * float(scores.square().mean(1).sum()), rel=1e-4)


def test_a_mismatch_is_the_next_pairs_chosen_answer_where_it_says_something(training):
    trainer = RewardTrainer(training(max_length=12))
    data = [Preference("a", " x", " y"), Preference("b", " z", " w"), Preference("b", " v", " w")]
    data += [
        Preference("c", " v", " u"),
        Preference("d", " a long answer", " s"),
        Preference("e", " t", " y"),
    ]
    rows = [trainer.encode(item) for item in data]
    found = [row.mismatch for row in trainer.with_mismatches(rows)]
    assert found[0] == (rows[0].chosen[0], rows[1].chosen[1])
    assert found[1] is None  # the same prompt
    assert found[2] is None  # the same answer
    assert found[3] is None  # too long after this prompt
    assert found[4] == (rows[4].chosen[0], rows[5].chosen[1])
    assert found[5] == (rows[5].chosen[0], rows[0].chosen[1])


def test_mismatches_teach_a_reward_model_to_read_the_prompt(training):
    """Every answer is as good as its rejected one says; only the mismatch says that it must name its prompt."""
    names = ("ann", "bob", "cid", "dan")
    data = [Preference(f"{name} {i} ", f" {name}.", " ...") for i in range(24) for name in names]
    probes = [Preference(f"{a} 30 ", f" {a}.", f" {b}.") for a in names for b in names if a != b]
    right = {}
    for coef in (0.0, 1.0):
        trainer = RewardTrainer(training(mismatch_coef=coef, epochs=4))
        trainer.train(data)
        with torch.no_grad(), trainer.role.active():
            right[coef] = float(
                (trainer.all_margins([trainer.encode(one) for one in probes]) > 0).float().mean()
            )
    assert right[1.0] > 0.9 > right[0.0]


def test_a_rating_models_language_loss_is_on_answers_above_the_mean(training):
    ratings = [Rating(f"q{i}", " good" if i % 2 else " bad", float(i % 2)) for i in range(20)]
    losses = {}
    for coef in (0.0, 1.0):
        trainer = RatingTrainer(training(lm_coef=coef))
        trainer.prepare(ratings, ratings)
        with torch.no_grad(), trainer.role.active():
            losses[coef] = [float(trainer.loss([trainer.encode(item)])) for item in ratings[:2]]
    assert losses[1.0][0] == pytest.approx(losses[0.0][0], rel=1e-5)
    assert losses[1.0][1] > losses[0.0][1] + 1


def test_chunks_of_tokens_change_neither_losses_nor_gradients(training, monkeypatch):
    from proxima.finetuning import example_batches

    found = []
    for chunk in (1024, 3):
        monkeypatch.setattr(example_batches, "CHUNK", chunk)
        trainer = RewardTrainer(training())
        rows = [trainer.encode(item) for item in PREFERENCES[:4]]
        with trainer.role.active():
            loss = trainer.loss(rows)
            loss.backward()
        parameters = trainer.role.parameters()
        found.append(
            (float(loss), torch.cat([one.grad.flatten() for one in parameters if one.grad is not None]))
        )
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5)


# --- defaults by rule ---


def test_defaults_follow_from_size_and_data_and_what_is_given_stays():
    small = with_defaults(RewardConfig(), 1_000_000, 5000)
    usual = with_defaults(RewardConfig(), 600_000_000, 5000)
    large = with_defaults(RewardConfig(), 70_000_000_000, 10**6)
    assert usual.learning_rate == 1e-4
    assert small.learning_rate > 10 * usual.learning_rate
    assert large.learning_rate == 2e-5
    assert (small.epochs, usual.epochs, large.epochs) == (4, 3, 1)
    assert with_defaults(RewardConfig(), 1_000_000, 12_000).epochs == 3
    assert with_defaults(RewardConfig(), 600_000_000, 12_000).epochs == 2
    full = with_defaults(RewardConfig(lora_r=0), 600_000_000, 5000)
    assert full.learning_rate == 1e-5
    assert with_defaults(RewardConfig(lora_r=0), 1_000_000, 5000).learning_rate == pytest.approx(
        9e-4, rel=0.1
    )
    given = with_defaults(RewardConfig(learning_rate=3e-4, epochs=2), 10**6, 5000)
    assert (given.learning_rate, given.epochs) == (3e-4, 2)


@pytest.mark.parametrize(("epochs", "reason"), [(0, "has not improved in epoch 3"), (4, "all epochs done")])
def test_training_ends_after_an_epoch_that_improved_nothing(training, monkeypatch, epochs, reason):
    losses = iter([0.9, 0.5, 0.6, 0.7, 0.4])  # at the end of each epoch, and once more for the report
    trainer = RewardTrainer(training(epochs=epochs, eval_every=3))
    measure = trainer.measure
    monkeypatch.setattr(trainer, "measure", lambda rows: {**measure(rows), "validation_loss": next(losses)})
    results = trainer.train(PREFERENCES)
    assert reason in results.stop_reason
    assert results.best["validation_loss"] == 0.5
    assert results.best["epoch"] == 2


# --- ensembles ---


def test_the_heads_of_an_ensemble_have_their_own_examples_and_the_mean_has_unit_variance(
    training, tiny, monkeypatch
):
    from proxima.config import PPOConfig, RewardSpec
    from proxima.ppo_trainer import PPOTrainer

    trainer = RewardTrainer(training(ensemble=3, epochs=2))
    rows = [trainer.encode(item) for item in PREFERENCES]
    shares = trainer.shares(rows)
    assert torch.equal(shares, trainer.shares(rows[::-1]).flip(0))
    assert set(shares.flatten().tolist()) == {0.0, 1.5}
    assert len({tuple(column) for column in shares.T.tolist()}) == 3
    results = trainer.train(PREFERENCES)
    with torch.no_grad():
        members = trainer.members(trainer.samples.rows)
    assert float(members.mean(1).std(correction=0)) == pytest.approx(1, abs=1e-3)
    assert members.mean(0).abs().max() < 1e-3
    folder = str(results.folder)
    trainers = [
        PPOTrainer(
            PPOConfig(tiny, max_new_tokens=5, rewards=RewardSpec(folder, options={"doubt_coef": coef}))
        )
        for coef in (0.0, 2.0)
    ]
    tokens = trainers[0].generator.sample(["prompt 1", "prompt 2", "prompt 3"], 1)
    sure, doubting = (one.reward_computer.score_tokens(tokens) for one in trainers)
    assert float(sure.spread.min()) > 0
    assert torch.allclose(doubting.total, sure.total - 2 * sure.spread, atol=1e-5)
    assert torch.allclose(
        trainers[0].models.reward.token_members(tokens).mean(1).double(), sure.total, atol=1e-5
    )
    heads = trainers[0].models.reward.head
    assert heads.weight.shape[0] == 3
    assert torch.allclose(trainers[0].models.value.head.weight, heads.weight.mean(0, keepdim=True))
    outcome = trainers[1].ppo_step(["prompt 1", "prompt 2"])
    assert outcome["reward_spread"] > 0
    computer = trainers[0].reward_computer
    [(_, source)] = kept = computer.rewards
    for weights_, factor in (((2.0,), 2.0), ((2.0, -0.5), 2.5)):  # each as it lowers or raises the score
        computer.rewards = [(RewardSpec(folder, weight, str(weight)), source) for weight in weights_]
        assert torch.allclose(computer.score_tokens(tokens).spread, factor * sure.spread)
    computer.rewards = kept
    # any process whose reward model failed takes part in gathering the spreads like the others
    computer = trainers[0].reward_computer
    monkeypatch.setattr(computer.models.reward, "token_members", lambda tokens: 1 / 0)
    failed = computer.score_tokens(tokens)
    assert failed.total.isnan().all()
    assert failed.spread is not None
    assert failed.spread.isnan().all()
    part = torch.tensor([math.nan, 0.5])
    assert score_metrics(part, {}, part)["reward_spread"] == 0.5


def test_doubt_of_a_single_head_is_refused(training, tiny):
    from proxima.config import PPOConfig, RewardSpec
    from proxima.ppo_trainer import PPOTrainer

    folder = str(RewardTrainer(training()).train(PREFERENCES).folder)
    with pytest.raises(ValueError, match="has one head, so doubt_coef does nothing"):
        PPOTrainer(PPOConfig(tiny, rewards=RewardSpec(folder, options={"doubt_coef": 1.0})))
    assert "reward_spread" not in PPOTrainer(PPOConfig(tiny, rewards=folder)).ppo_step(["prompt 1"])


# --- the unit of the scores ---


@pytest.mark.parametrize("way", [{}, {"lora_r": 0, "learning_rate": 3e-3}], ids=["lora", "full"])
def test_saved_scores_have_mean_0_and_unit_variance_over_samples_of_the_start(training, way, tiny):
    import json

    from proxima.config import PPOConfig
    from proxima.models import REPORT_FILE, saved_units
    from proxima.ppo_trainer import PPOTrainer

    trainer = RewardTrainer(training(**way))
    results = trainer.train(PREFERENCES)
    with torch.no_grad():
        assert_standardised(trainer.all_scores(trainer.samples.rows))
    unit = json.loads((results.folder / REPORT_FILE).read_text())["unit"]
    assert len(saved_units(results.folder)) == 1
    assert unit["samples"] == 23  # one per training prompt; one pair is held out
    assert (unit["model"], unit["temperature"], unit["seed"]) == (tiny, 1.0, 0)
    config = PPOConfig(
        tiny,
        rewards=str(results.folder),
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=unit["max_new_tokens"],
    )
    ppo = PPOTrainer(config)
    assert ppo.reward_computer.lacking_units() == []
    prompts = [trainer.tokenizer.decode(prompt) for prompt, _ in trainer.samples.rows]
    tokens = ppo.generator.sample(prompts, 0, reference=True)  # the same noise: the same answers
    assert tokens.response_rows == [response for _, response in trainer.samples.rows]
    assert_standardised(ppo.reward_computer.score_tokens(tokens).total)


def assert_standardised(scores):
    assert float(scores.mean()) == pytest.approx(0, abs=1e-3)
    assert float(scores.std(correction=0)) == pytest.approx(1, abs=1e-3)


def test_constant_scores_are_refused_in_one_line(training, monkeypatch):
    trainer = RewardTrainer(training())
    monkeypatch.setattr(trainer, "members", lambda rows: torch.full((len(rows), 1), 0.25))
    with pytest.raises(ValueError, match=r"scores all 23 sampled answers 0\.25: there is nothing to learn"):
        trainer.train(PREFERENCES)


def test_pairs_that_are_all_ties_are_refused(training):
    ties = [Preference(item.prompt, item.chosen, item.rejected, tie=True) for item in PREFERENCES]
    with pytest.raises(ValueError, match="all 23 pairs are ties"):
        RewardTrainer(training()).train(ties)
    with pytest.raises(ValueError, match="all held-out pairs are ties"):
        RewardTrainer(training()).train(PREFERENCES, ties)
    long = Preference("prompt", " yes" * 100, " no")
    with pytest.raises(ValueError, match=r"all held-out pairs that fit max_length \(50 tokens\) are ties"):
        RewardTrainer(training(max_length=50)).train(PREFERENCES, [*ties, long])


RATINGS = [Rating(item.prompt, item.chosen, 3.0 * (i % 4) + 10) for i, item in enumerate(PREFERENCES)]
CENTRE = [Demonstration(f"prompt {i}", " no") for i in range(3)]


def trained_and_continued(trainer, config, examples, later, **given):
    """A trained model and its members' scores as training left them, and the trainer that goes on from it."""
    first = trainer(config(), **given)
    rows = first._fitting(examples, range(len(examples)))
    answers = [answer for row in rows for answer in first.answers(row)]
    raw, finish = [], first.finish
    first.finish = lambda held_out: raw.append(first.members(answers).detach()) or finish(held_out)
    folder = first.train(examples, examples[:4]).folder
    second = trainer(config(learning_rate=1e-12))
    second.continued = str(folder)
    second.prepare(later, later)
    second.settle(rows, rows)
    with torch.no_grad():
        return first, second, raw[0], second.members(answers)


@pytest.mark.parametrize("ensemble", [1, 3])
@pytest.mark.parametrize("centre", [None, CENTRE], ids=["samples", "demonstrations"])
@pytest.mark.parametrize("way", [{}, {"lora_r": 0, "learning_rate": 3e-3}], ids=["lora", "full"])
def test_training_that_continues_starts_from_the_logits_of_choices(training, way, centre, ensemble):
    """The unit is taken out of each head again, and answers are sampled from the base, not the reward
    model."""
    first, second, raw, found = trained_and_continued(
        RewardTrainer, lambda **more: training(ensemble=ensemble, **{**way, **more}), PREFERENCES,
        PREFERENCES, centre_on=centre,
    )  # fmt: skip
    assert found.shape == (48, ensemble)
    assert torch.allclose(found, raw, atol=1e-4)
    sampled = [{tuple(prompt + answer) for prompt, answer in one.samples.rows} for one in (first, second)]
    assert sampled[0] == sampled[1]


@pytest.mark.parametrize("ensemble", [1, 3])
def test_training_that_continues_on_ratings_starts_from_the_same_ratings(training, ensemble):
    """Also where the new ratings have another mean and deviation, in which the heads now count."""
    later = [Rating(item.prompt, item.completion, 2 * item.rating + 1) for item in RATINGS[:10]]
    first, second, raw, found = trained_and_continued(
        RatingTrainer, lambda **more: training(ensemble=ensemble, **more), RATINGS, later
    )
    assert (second.mean, second.deviation) != pytest.approx((first.mean, first.deviation))
    as_ratings = [scores * one.deviation + one.mean for one, scores in ((first, raw), (second, found))]
    assert torch.allclose(*as_ratings, atol=1e-3)


def test_a_folder_from_before_each_head_had_a_unit_of_its_own_still_continues(tmp_path):
    import json

    from proxima.models import REPORT_FILE, ScoreUnit, saved_units

    assert saved_units(tmp_path) == []
    (tmp_path / REPORT_FILE).write_text(json.dumps({"unit": {"mean": 1.5, "deviation": 2.0}}))
    assert saved_units(tmp_path) == [ScoreUnit(1.5, 2.0)]


def test_units_one_after_the_other_are_one_unit_and_have_an_inverse():
    from proxima.models import ScoreUnit

    scores = torch.linspace(-3, 5, 9, dtype=torch.float64)
    first, second = ScoreUnit(1.5, 0.25), ScoreUnit(-2.0, 3.0)
    assert torch.allclose(first.then(second)(scores), second(first(scores)))
    assert torch.allclose(first.inverse(first(scores)), scores)


# --- settings of earlier versions ---


def test_settings_files_from_before_these_settings_still_load(training, tmp_path):
    from proxima.config import FinetuningConfig, saved_settings

    old = tmp_path / "finetuning.yaml"
    FinetuningConfig(learning_rate=3e-4, epochs=2).to_yaml(old)
    assert saved_settings(old) == FinetuningConfig(learning_rate=3e-4, epochs=2)
    taken = RewardConfig.from_yaml(old)
    assert (taken.learning_rate, taken.epochs, taken.lm_coef) == (3e-4, 2, 0.3)
    trainer = RewardTrainer(FinetuningConfig(training().model_name, learning_rate=3e-4))
    assert (trainer.config.epochs, trainer.config.lm_coef, trainer.config.mismatch_coef) == (1, 0.0, 0.0)
    folder = RewardTrainer(training(epochs=0)).train(PREFERENCES).folder
    written = saved_settings(folder / "finetuning.yaml")
    assert isinstance(written, RewardConfig)
    assert written.epochs == 4  # what the rule gave
