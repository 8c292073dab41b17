"""Episodes through the whole pipeline: the tokens that were sampled are the tokens that are trained on."""

import dataclasses
import json
import math
import random
import sys
import time
from dataclasses import replace

import pytest
import torch

from proxima import Step
from proxima.config import RewardSpec
from proxima.core.errors import RewardFailure
from proxima.core.types import Prompt
from proxima.environments import EpisodeRunner, episode_runner
from proxima.evaluator.diversity import distinct
from proxima.evaluator.finished_run import best_of_rows, evaluate_run
from proxima.evaluator.held_out import HeldOut, reference_answers
from proxima.models import base_model
from proxima.pages.report import write_report
from proxima.ppo_trainer import PPOTrainer, SequenceGenerator, best_samples
from proxima.ppo_trainer.token_records import sample_row
from proxima.rewards import Samples
from proxima.runs import Run
from tests.environments.games import (
    FAULTS,
    HARMLESS,
    HOSTILE,
    KILLED,
    UNHARMED,
    Closed,
    Counter,
    Faulty,
    Graded,
    Gym,
    Hostile,
    Levels,
    Once,
    Parity,
    Slow,
    Unseeded,
    odd_sum,
)
from tests.helpers import LOGPROB_ROUNDING, Crash, crash_at, difference, rounding, shake, weights

EOS = tuple(range(0, 200, 5))  # turns of several lengths


def make_trainer(make_config, **settings) -> PPOTrainer:
    given = {"environment": Parity, "rewards": (), "max_turns": 4, "max_new_tokens": 4, "top_k": 20}
    trainer = shake(PPOTrainer(make_config(**{**given, **settings})))
    trainer.models.eos_ids = EOS
    return trainer


def rollout(trainer, prompts, step=0):
    return trainer.generator.generate_sequences([*prompts, *prompts], step)[0]


def cells(tokens):
    """What was sampled and read, without padding."""
    return [
        (ids, real[: len(ids)]) for ids, real in zip(tokens.response_rows, tokens.mask.tolist(), strict=True)
    ]


# --- tokens


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_ids_are_the_same_in_engine_scorer_and_update(make_config, prompts, engine):
    """Three turns, top-k on: the ratio of the first minibatch is exactly 1."""
    trainer = make_trainer(make_config, engine=engine, ppo_epochs=2)
    passes = []
    plain = trainer.models.policy.response_hidden

    def watch(tokens):
        rows = zip(tokens.input_ids, tokens.input_mask, strict=True)
        passes.append([ids[real].tolist() for ids, real in rows])
        return plain(tokens)

    sampled = trainer.generator.sample([*prompts, *prompts])
    trainer.models.policy.response_hidden = watch
    results = trainer.ppo_step([*prompts, *prompts])
    tokens = results["sa_pairs"].tokens
    assert results["first_ratio_error"] < 1e-5
    assert results["sampling_gap"] <= LOGPROB_ROUNDING
    assert results["episode_turns"] == 3
    assert results["eos_rate"] == 1
    expected = sorted(tokens.input_ids[row][tokens.input_mask[row]].tolist() for row in range(8))
    assert sorted(sampled.input_ids[row][sampled.input_mask[row]].tolist() for row in range(8)) == expected
    rows = [row for each in passes for row in each]
    assert len(rows) == 3 * 8  # scored once, then two epochs of minibatches
    for start in (0, 8, 16):
        assert sorted(rows[start : start + 8]) == expected


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_an_episode_of_one_turn_is_trained_on_as_a_response_is(make_config, prompts, engine):
    """To the same bits: tokens, advantages and weights."""
    found = []
    for settings in ({"environment": Once, "max_turns": 1}, {"environment": (), "rewards": [odd_sum]}):
        trainer = make_trainer(make_config, engine=engine, learning_rate=1e-2, **settings)
        results = trainer.ppo_step([*prompts, *prompts])
        found.append((trainer, results["sa_pairs"], results["rewards"]))
    (one, episode, scores), (other, response, expected) = found
    assert any(expected)
    assert scores == expected
    assert cells(episode.tokens) == cells(response.tokens)
    assert torch.equal(episode.column("advantage"), response.column("advantage"))
    assert difference(weights(one), weights(other)) == 0


def test_both_engines_sample_the_same_episodes(make_config, prompts):
    found = [rollout(make_trainer(make_config, engine=engine), prompts) for engine in ("auto", "plain")]
    assert cells(found[0].tokens) == cells(found[1].tokens)
    torch.testing.assert_close(
        found[0].column("logprob_policy"), found[1].column("logprob_policy"), rtol=0, atol=LOGPROB_ROUNDING
    )
    kept = [pairs.tokens.kept.ids.sort(-1).values for pairs in found]
    assert torch.equal(kept[0], kept[1])


def test_observations_stand_where_they_were_read_and_are_not_acted(make_config, prompts):
    tokens = rollout(make_trainer(make_config), prompts).tokens
    encode = tokens.tokenizer
    for ids, acted in cells(tokens):
        read = [token for token, own in zip(ids, acted, strict=True) if not own]
        text = encode.decode(read)
        assert len(text) == 2 * len(" [12]")
        assert text[:2] == " ["
        assert acted[0]
        assert acted[-1]
    assert not tokens.sampled_logprobs[~tokens.mask].any()
    assert (tokens.kept.ids[~tokens.mask] == -1).all()


def test_a_tokenisation_that_no_tokenizer_writes_survives(make_config, prompts):
    """Bytes that are not text are sampled all the time here; what is trained on are these very ids."""
    trainer = make_trainer(make_config, top_k=0, top_p=1.0)
    tokens = rollout(trainer, prompts).tokens
    again = [
        trainer.tokenizer(text, add_special_tokens=False)["input_ids"] for text in tokens.texts(special=True)
    ]
    assert again != tokens.response_rows  # decoding and encoding loses them
    trained = trainer.ppo_step([*prompts, *prompts])["sa_pairs"].tokens
    assert cells(trained) == cells(tokens)


def test_what_is_sampled_depends_neither_on_slots_nor_on_how_long_answers_take(make_config, prompts):
    expected = cells(rollout(make_trainer(make_config), prompts).tokens)
    for slots in (1, 3, 8):
        trainer = make_trainer(make_config, environment=Slow, step_seconds=20.0)
        trainer.models.policy.backbone.generation.max_slots = slots
        assert cells(rollout(trainer, prompts).tokens) == expected


def test_a_group_meets_one_environment_and_other_prompts_another(make_config, prompts):
    trainer = make_trainer(
        make_config,
        num_generations=4,
        adv_estimator="rloo",
        whiten_advantages=False,
        value_learning_rate=1e-4,
        max_turns=2,
    )
    tokens = trainer.ppo_step(["same", "same", "other"])["sa_pairs"].tokens
    read = read_texts(tokens)
    assert [len({*read[start : start + 4]}) for start in (0, 4, 8)] == [1, 1, 1]
    assert len({*read}) == 3


def read_texts(tokens):
    return [
        tokens.tokenizer.decode([t for t, own in zip(ids, acted, strict=True) if not own])
        for ids, acted in cells(tokens)
    ]


def test_in_an_evaluation_equal_prompts_meet_environments_of_their_own(make_config):
    trainer = make_trainer(make_config, max_turns=2, num_generations=4)
    assert len({*read_texts(trainer.generator.sample(["same"] * 4, 0))}) == 1
    assert len({*read_texts(trainer.generator.sample(["same"] * 4, -1))}) > 1


def test_the_samples_that_a_best_is_chosen_of_meet_one_environment(make_config, monkeypatch):
    seen = []
    plain = SequenceGenerator.sample_groups

    def watch(self, *args, **named):
        seen.append(read_texts(tokens := plain(self, *args, **named)))
        return tokens

    monkeypatch.setattr(SequenceGenerator, "sample_groups", watch)
    trainer = make_trainer(make_config, max_turns=2, batch_size=4, engine="plain")
    best_of_rows(trainer, ["one", "one", "other"], 3)  # batches of 4 are not a multiple of 3
    best_samples(trainer.models, trainer.tokenizer, trainer.config, ["one", "other"], 3)
    rows = [text for batch in seen for text in batch]
    groups = [{*rows[start : start + 3]} for start in range(0, len(rows), 3)]
    assert [len(group) for group in groups] == [1] * 5
    assert groups[0] != groups[1] != groups[2]


def test_what_was_read_is_not_a_part_of_what_is_measured_of_responses(make_config, prompts):
    """Nor of answers to compare, whose prompts are those that `reset` opened."""
    seen = []

    def pair(prompts, ours, theirs):
        seen.extend(prompts)
        return [0.5] * len(prompts)

    trainer = make_trainer(make_config, environment=Gym, judges=[RewardSpec(pair)], token_samples=2)
    tokens = trainer.generator.sample(prompts, -1)
    own = [[tokens.tokenizer.decode(turn) for turn in turns_in(*each)] for each in cells(tokens)]
    plain = Samples.of_tokens(tokens).own_turns
    assert [len(turns) for turns in plain] == [2] * len(prompts)
    assert plain == own
    held_out = HeldOut(trainer, prompts)
    measured = held_out()
    assert measured["distinct_1"] == distinct(["\n".join(turns) for turns in own], 1)
    lengths = tokens.mask.sum(1).tolist()
    assert measured["response_length"] == sum(lengths) / len(lengths)
    assert [sample_row(record)["length"] for record in held_out.records] == lengths[:2]
    reference = reference_answers(trainer, prompts)
    theirs = trainer.generator.sample(prompts, -1, reference=True)
    assert reference.measured["response_length"] == int(theirs.mask.sum()) / len(prompts)
    assert {*map(str, seen)} <= {f"{prompt} start:" for prompt in prompts}
    assert seen


def turns_in(ids, acted):
    turns = [[]]
    for token, own in zip(ids, acted, strict=True):
        if own:
            turns[-1].append(token)
        elif turns[-1]:
            turns.append([])
    return [turn for turn in turns if turn]


# --- the update


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_the_gradient_is_that_of_a_plain_pass_over_the_policys_own_tokens(make_config, prompts, engine):
    trainer = make_trainer(make_config, engine=engine, top_k=0, top_p=1.0)
    pairs = rollout(trainer, prompts)
    advantages = torch.randn(pairs.mask.shape, generator=torch.Generator().manual_seed(0))
    returns = torch.randn(pairs.mask.shape, generator=torch.Generator().manual_seed(1))
    pairs = pairs.with_columns(advantage=advantages, **{"return": returns})
    policy, value, tokens = trainer.models.policy, trainer.models.value, pairs.tokens
    trainer.model_trainer._policy_backward(pairs)
    ours = [parameter.grad.clone() for parameter in policy.parameters()]
    trainer.model_trainer._value_backward(pairs)
    of_value = [parameter.grad.clone() for parameter in value.parameters()]
    total = tokens.mask.sum()
    trainer.model_trainer.policy_optimizer.zero_grad()
    trainer.model_trainer.value_optimizer.zero_grad()
    for row in range(len(tokens.prompts)):
        ids, own = tokens.input_ids[row][tokens.input_mask[row]], tokens.mask[row]
        places = int(tokens.prompt_mask[row].sum()) + own.nonzero().flatten()
        with policy.training(), policy.active():
            logprobs = policy.backbone.network(ids[None]).logits[0].float().log_softmax(-1)
            chosen = logprobs[places - 1, ids[places]]
            (-(chosen * advantages[row][own]).sum() / total).backward()
        scored = pairs.column("logprob_policy")[row][own]
        assert float((chosen.detach() - scored).abs().max()) <= LOGPROB_ROUNDING
        with value.training(), value.active():
            states = value.backbone.network(ids[None], output_hidden_states=True).hidden_states[-1][0]
            errors = value.head_values(states[places - 1]) - returns[row][own]
            ((errors**2).sum() / total).backward()
    for role, found in ((policy, ours), (value, of_value)):
        assert max(float(gradient.abs().max()) for gradient in found) > 1e-3
        for parameter, gradient in zip(role.parameters(), found, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"value_model": "policy"}, {"engine": "plain"}])
def test_out_of_memory_halves_the_micro_batch_and_repeats_the_step(
    make_config, prompts, monkeypatch, caplog, settings
):
    def run(failures):
        trainer = make_trainer(make_config, micro_batch_size=4, minibatch_size=4, **settings)
        original, calls = base_model.BaseModel.response_hidden, []

        def sometimes(self, tokens):
            assert tokens.observed is not None
            calls.append(len(tokens.prompts))
            if len(calls) in failures:
                raise torch.cuda.OutOfMemoryError("made up")
            return original(self, tokens)

        monkeypatch.setattr(base_model.BaseModel, "response_hidden", sometimes)
        results = trainer.ppo_step(prompts)
        monkeypatch.undo()
        return trainer, len(calls), results

    plain, count, results = run(())
    assert results["episode_turns"] > 1
    for failures in ((1,), (3,), (count // 2, count // 2 + 4), (count,)):
        with caplog.at_level("WARNING"):
            split, _, again = run(failures)
        assert again["generated_texts"] == results["generated_texts"]
        assert again["rewards"] == results["rewards"]
        assert difference(weights(plain), weights(split)) < rounding(plain)
        assert split.models.micro_batches.size == 4 // 2 ** len(failures)
        assert "micro-batches are now" in caplog.text
    with pytest.raises(torch.cuda.OutOfMemoryError):
        run(range(100))


@pytest.mark.parametrize("environment", [Parity, Unseeded])
def test_out_of_memory_between_turns_begins_the_episodes_again_in_fewer_slots(
    make_config, monkeypatch, caplog, environment
):
    prompts = [f"prompt {i} " for i in range(6)]
    trainer = make_trainer(make_config, environment=environment)
    whole = trainer.generator.sample(prompts) if environment is Parity else None
    trainer.models.policy.backbone.generation._slots = None
    original, failures = EpisodeRunner.replies, [3]

    def sometimes(self, wait_for_one):
        failures[0] -= 1
        if not failures[0]:
            raise torch.cuda.OutOfMemoryError("made up")
        return original(self, wait_for_one)

    monkeypatch.setattr(EpisodeRunner, "replies", sometimes)
    if environment is Unseeded:
        with pytest.raises(ValueError, match="returned another text for the same seed"):
            trainer.generator.sample(prompts)
        return
    again = trainer.generator.sample(prompts)
    assert failures[0] < 0
    assert "sampling now has 3 slots" in caplog.text
    assert torch.equal(again.response_ids, whole.response_ids)
    assert [episode.rewards for episode in again.episodes] == [episode.rewards for episode in whole.episodes]


def test_rewards_stand_on_the_last_token_of_their_turns(make_config, prompts):
    trainer = make_trainer(make_config, kl_coef=0.0, whiten_advantages=False)
    results = trainer.ppo_step(prompts)
    pairs = results["sa_pairs"]
    for row, (ids, acted) in enumerate(cells(pairs.tokens)):
        ends = [i for i, own in enumerate(acted) if own and (i + 1 == len(acted) or not acted[i + 1])]
        assert len(ends) == 3
        placed = pairs.column("reward")[row]
        assert placed[ends].tolist() == pytest.approx(pairs.tokens.episodes[row].rewards, rel=1e-6)
        assert float(placed.abs().sum()) == pytest.approx(float(placed[ends].abs().sum()))
        assert results["rewards"][row] == pytest.approx(sum(pairs.tokens.episodes[row].rewards))
        assert len(ids) == len(acted)


def test_rewards_add_up_with_weights_and_other_rewards(make_config, prompts):
    def ten(prompts, completions):
        return [10.0] * len(prompts)

    trainer = make_trainer(make_config, environment=["2*tests.environments.games:Parity"], rewards=(ten,))
    results = trainer.ppo_step(prompts)
    own = [sum(episode.rewards) for episode in results["sa_pairs"].tokens.episodes]
    assert results["rewards_by_name"]["Parity"] == pytest.approx(own)
    assert results["rewards"] == pytest.approx([10 + 2 * reward for reward in own])


@pytest.mark.parametrize("options", [{}, {"workers": 1, "timeout": 30.0}])
def test_rewards_get_the_turns_of_an_episode_by_name(make_config, prompts, options):
    """Also as a judge of an evaluation; a slice keeps them."""
    spec = RewardSpec("tests.environments.games:said_and_read", options=options)
    trainer = make_trainer(make_config, rewards=(spec,), judges=(replace(spec, name="judge"),))
    tokens = rollout(trainer, prompts).tokens
    samples = Samples.of_tokens(tokens)
    assert samples.part(1, 3).turns == samples.turns[1:3] == samples.conversations[1:3]
    said = [[turn["text"] for turn in turns] for turns in samples.turns]
    assert ["".join(texts) for texts in said] == samples.completions
    wanted = [100.0 * len(turns[::2]) + len("".join(turns[1::2])) for turns in said]
    assert max(wanted) > 200
    by_name = trainer.reward_computer.score_tokens(tokens).by_name
    assert by_name["said_and_read"].tolist() == wanted
    assert trainer.judges.score(samples)["judge"] == wanted


def test_outside_of_episodes_the_completion_is_the_one_turn_and_columns_go_before(make_config):
    seen = []

    def reward(prompts, completions, turns):
        seen.append(turns)
        return [0.0] * len(prompts)

    trainer = PPOTrainer(make_config(rewards=(reward,)))
    texts = trainer.ppo_step(["a", "b"])["generated_texts"]
    assert seen[-1] == [[{"role": "assistant", "text": text}] for text in texts]
    trainer.ppo_step([Prompt("a", {"turns": "mine"})])
    assert seen[-1] == ["mine"]
    trainer = PPOTrainer(make_config(rewards=(RewardSpec(reward, options={"turns": 3}),)))
    trainer.ppo_step(["a"])
    assert seen[-1] == 3


def test_a_judge_that_scores_is_not_given_the_environments_rewards(make_config, prompts):
    def one(prompts, completions):
        return [1.0] * len(prompts)

    trainer = make_trainer(make_config, environment=Gym, judges=[RewardSpec(one)], discount="turn")
    samples = Samples.of_tokens(rollout(trainer, prompts).tokens)
    assert trainer.judges.score(samples) == {"one": [1.0] * len(samples)}


@pytest.mark.parametrize(
    "settings",
    [
        {"environment": Gym},
        {"max_turns": 2},
        {"max_new_tokens": 3},
        {"max_episode_tokens": 12},
        {"discount": "turn"},
        {"tools": ["tests.environments.games:multiply"]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_the_settings_of_episodes_change_the_outcome(make_config, prompts, settings):
    found = []
    for given in ({}, settings):
        trainer = make_trainer(make_config, **given)
        for prompt in (prompts, prompts):
            trainer.ppo_step(prompt)
        found.append(weights(trainer))
    if "tools" in settings:  # without a chat template they change nothing until they are called
        assert difference(*found) == 0
    else:
        assert difference(*found) > 1e-7


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": "vllm"}, "vLLM is not supported there"),
        ({"environment": [Parity, Gym]}, "environment is one class, got 2: Parity, Gym"),
        ({"environment": "ends_with_eos"}, "environment: 'ends_with_eos' is not module:Class"),
        ({"environment": "no_such_module:Game"}, "cannot load the environment 'no_such_module:Game'"),
        ({"environment": dataclasses.replace}, "is not a class"),
        ({"environment": lambda: Counter(first=2)}, "in place of a function that makes one its options"),
        (
            {"environment": ["tests.environments.games:Counter,size=3"]},
            r"environment 'Counter' has no option 'size'; it takes first \(int\)",
        ),
        (
            {"environment": ["tests.environments.games:Counter,first=one"]},
            r"option first \('one'\) of environment 'Counter' must be of type int",
        ),
        ({"environment": "tests.environments.games:Levels"}, "environment 'Levels' needs the option 'level'"),
        ({"environment": Step}, "Step"),
        ({"environment": (), "discount": "turn"}, "there are none without environment or tools"),
        ({"tools": [lambda x: x]}, "needs a type for each argument"),
        ({"tools": ["tests.environments.games:multiply,left=2"]}, "tools do not take"),
    ],
)
def test_what_cannot_be_run_is_refused_in_words(make_config, settings, words):
    with pytest.raises(ValueError, match=words):
        make_trainer(make_config, **settings)


@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_an_environment_is_made_with_the_options_of_its_entry(make_config, seconds):
    """Whether its `__init__` takes them by name alone or not, in their types."""
    for entry in (
        "tests.environments.games:Levels,level=3,rate=1e-2",
        RewardSpec(Levels, options={"level": 3, "rate": "1e-2"}),
    ):
        trainer = make_trainer(make_config, environment=[entry], step_seconds=seconds)
        tokens = trainer.generator.sample(["made with"])
        assert [str(prompt) for prompt in tokens.prompts] == ["made with 3 0.01"]


# --- environments of other libraries


@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_gymnasiums_five_values_and_a_reset_with_information(make_config, prompts, seconds):
    """Which may be anything, and is not sent out of a process."""
    results = make_trainer(make_config, environment=Gym, step_seconds=seconds).ppo_step(prompts)
    tokens = results["sa_pairs"].tokens
    assert [str(prompt) for prompt in tokens.prompts] == [f"{prompt} start:" for prompt in prompts]
    assert results["rewards"] == [1.0] * len(prompts)
    assert results["eos_rate"] == 0  # truncated is not terminated
    assert results["episode_turns"] == 2


def scripted(trainer, *turns, eos=True, cut=()):
    """The policy writes these turns, one after the other; those whose numbers are in `cut` have no end."""
    encode = trainer.tokenizer
    ends = [[encode.eos_token_id] if eos and turn not in cut else [] for turn in range(len(turns))]
    ids = [
        encode(turn, add_special_tokens=False)["input_ids"] + end
        for turn, end in zip(turns, ends, strict=True)
    ]
    trainer.models.eos_ids = (encode.eos_token_id,)

    def generate(prompts, sampling, conversation):
        return write_turns(prompts, sampling, conversation, ids)

    trainer.models.policy.generate = generate
    return trainer


def write_turns(prompts, sampling, conversation, ids):
    from proxima.core.transcript import Transcript

    transcript = Transcript(prompts, sampling, conversation)
    rows, turn = list(range(len(prompts.prompts))), 0
    while rows:
        for row in rows:
            transcript.end_turn(row, ids[turn])
        rows, turn = transcript.take_replies(wait=True), turn + 1
    response_ids, chosen, observed = transcript.responses()
    return replace(prompts, response_ids=response_ids, mask=chosen, observed=observed)


CALL = '<tool_call>{"name": "add", "arguments": {"number": 2}}</tool_call>'


@pytest.mark.parametrize("seconds", [0.0, 20.0])
@pytest.mark.parametrize(("environment", "reward"), [(Counter, 1.0), (Graded, 20.0)])
def test_methods_are_tools_as_in_trl(make_config, environment, reward, seconds):
    trainer = make_trainer(
        make_config,
        environment=environment,
        max_new_tokens=80,
        top_k=0,
        top_p=1.0,
        max_turns=3,
        step_seconds=seconds,
        max_episode_tokens=200,
    )
    results = scripted(trainer, CALL, "done").ppo_step(["Please."])
    tokens = results["sa_pairs"].tokens
    assert [str(prompt) for prompt in tokens.prompts] == ["Please. Count to two."]
    assert tokens.texts() == [f"{CALL}2done"]
    assert results["rewards"] == [reward]
    assert results["eos_rate"] == 1


def test_calls_that_cannot_be_made_are_read_as_errors(make_config):
    broken = [
        ("<tool_call>{}</tool_call>", "error: the call has no name"),
        (
            '<tool_call>{"name": "subtract"}</tool_call>',
            "error: there is no tool 'subtract'; the tools are add",
        ),
        (
            CALL.replace('"number": 2', '"much": 2'),
            "error: add has no argument 'much'; it takes number",
        ),
        (CALL.replace("2", '"two"'), "error: the argument 'number' of add must be of type integer"),
        ("<tool_call>{", "error: <tool_call> has no </tool_call>"),
        (CALL.replace('"number": 2', '"method": 2, "self": 3'), "error: add has no argument 'method'"),
    ]
    for call, words in broken:
        trainer = make_trainer(
            make_config, environment=Counter, max_new_tokens=90, max_episode_tokens=230, top_k=0, top_p=1.0
        )
        results = scripted(trainer, call, "done").ppo_step(["x"])
        assert words in results["generated_texts"][0]
        assert results["malformed_calls"] == 1
        assert results["rewards"] == [0.0]


def test_no_argument_of_a_call_reaches_the_trainer(make_config):
    """Names that the trainer's own calls use, too."""
    call = CALL.replace('"number": 2', '"timeout": 600')
    trainer = make_trainer(
        make_config,
        environment=Counter,
        max_new_tokens=90,
        max_episode_tokens=230,
        step_seconds=20.0,
        top_k=0,
        top_p=1.0,
    )
    results = scripted(trainer, call, "done").ppo_step(["x"])
    assert "error: add has no argument 'timeout'" in results["generated_texts"][0]


def test_an_argument_of_a_tool_may_have_any_name(make_config):
    for seconds in (0.0, 20.0):
        trainer = with_tool(make_config, "after", step_seconds=seconds)
        call = call_of("after", timeout=3, method="m")
        results = scripted(trainer, call, "done").ppo_step(["x"])
        assert results["generated_texts"] == [f"{call}3 mdone"]


@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_an_environment_is_closed_once_after_each_episode(make_config, prompts, tmp_path, seconds):
    """What its `close` raises costs nothing."""
    rows = [Prompt(prompt, {"folder": str(tmp_path)}) for prompt in prompts]
    results = make_trainer(make_config, environment=Closed, step_seconds=seconds).ppo_step(rows)
    assert results["failed_rewards"] == 0
    assert (tmp_path / "closed").read_text() == "closed\n" * len(prompts)


@pytest.mark.timeout(120)
def test_closing_waits_for_no_turn(make_config, prompts, monkeypatch):
    """After Ctrl-C: neither for the one that is being answered, nor for those behind it."""
    monkeypatch.setattr(episode_runner, "MOST_AT_ONCE", 1)
    config = make_config(environment=Faulty, rewards=(), step_seconds=10.0)
    environment = make_trainer(make_config, environment=Faulty, step_seconds=10.0).generator.environment
    rows = [Prompt(prompt, {"fault": "hangs"}) for prompt in prompts[:3]]
    runner = EpisodeRunner(environment, rows, [1, 2, 3], None, EOS)
    for row in range(3):
        runner.finish_turn(row, [1, 2])
    time.sleep(0.5)
    began = time.monotonic()
    runner.close()
    assert time.monotonic() - began < config.step_seconds / 2
    assert not any(running.host.worker.alive for running in runner.running)


def with_tool(make_config, name, **settings):
    """A trainer with this tool and no environment."""
    given = {"environment": (), "rewards": ("ends_with_eos",), "max_new_tokens": 120}
    given |= {"max_episode_tokens": 230, "top_k": 0, "top_p": 1.0}
    return make_trainer(make_config, tools=[f"tests.environments.games:{name}"], **{**given, **settings})


def call_of(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_episodes_that_fail_beside_tools_alone_are_left_out(make_config, caplog):
    trainer = scripted(with_tool(make_config, "repeat"), call_of("repeat", count=300_000), "done")
    with pytest.raises(RewardFailure, match="tools: the tool repeat returned 300,000 characters"):
        trainer.ppo_step(["x"])
    assert "1 of 1 episodes failed: tools: the tool repeat" in caplog.text


def test_a_verifier_grades_what_the_policy_said_last(make_config):
    """Not the words of a tool, which may hold the reference."""
    asked = call_of("echo", text="The answer is B. ")
    for last, reward in (("B", 1.0), ("The answer is A", 0.0), ("It is so", 0.0)):
        trainer = scripted(with_tool(make_config, "echo", rewards=("choice",)), asked, last)
        results = trainer.ppo_step([Prompt("x", {"answer": "B"})])
        assert results["generated_texts"] == [f"{asked}The answer is B. {last}"]
        assert results["rewards"] == [reward]


def test_an_answer_after_tools_that_was_cut_is_not_done(make_config):
    for eos in (True, False):
        trainer = scripted(with_tool(make_config, "echo"), call_of("echo", text="y"), "done", eos=eos)
        assert trainer.ppo_step(["x"])["eos_rate"] == eos


def test_half_a_character_out_of_a_tool_is_read_as_a_question_mark(make_config):
    trainer = scripted(with_tool(make_config, "half"), call_of("half"), "done")
    results = trainer.ppo_step(["x"])
    assert results["generated_texts"] == [f"{call_of('half')}a?bdone"]
    assert results["failed_rewards"] == 0


def test_a_tool_that_hangs_is_read_as_an_error(make_config):
    call = '<tool_call>{"name": "hang", "arguments": {"seconds": 60}}</tool_call>'
    trainer = make_trainer(
        make_config,
        environment=(),
        tools=["tests.environments.games:hang"],
        rewards=("ends_with_eos",),
        step_seconds=0.5,
        max_new_tokens=80,
        max_episode_tokens=200,
        top_k=0,
        top_p=1.0,
    )
    results = scripted(trainer, call, "done").ppo_step(["x"])
    assert "error: timeout: no answer within 0.5 s" in results["generated_texts"][0]
    assert results["failed_rewards"] == 0


def test_the_calls_of_a_turn_share_its_seconds_and_the_next_turn_has_its_own(make_config):
    trainer = make_trainer(
        make_config,
        environment=(),
        tools=["tests.environments.games:hang"],
        rewards=("ends_with_eos",),
        step_seconds=1.0,
        max_new_tokens=250,
        max_episode_tokens=700,
        max_turns=3,
        top_k=0,
        top_p=1.0,
    )
    tokenizer = trainer.tokenizer
    runner = EpisodeRunner(trainer.generator.environment, ["x"], [0], None, [tokenizer.eos_token_id])

    def answer(turn):
        runner.finish_turn(0, [*tokenizer(turn)["input_ids"], tokenizer.eos_token_id])
        (reply,) = runner.replies(True)
        return tokenizer.decode(reply.ids)

    text = answer(call_of("hang", seconds=60) * 3)
    assert text.count("error: timeout: no answer within 1 s") == 1
    assert text.count("error: timeout: not called, the 1 s of a turn are over") == 2
    assert "awake" in answer(call_of("hang", seconds=0))
    runner.close()


def test_an_evaluation_shows_prompts_as_environments_opened_them(make_config, prompts, tmp_path):
    trainer = make_trainer(make_config, environment="tests.environments.games:Gym")
    folder = trainer.save(tmp_path / "run")
    trainer.config.to_yaml(folder / "config.yaml")
    samples = evaluate_run(folder, prompts, environment=trainer.config.environment)["samples"]
    assert [sample["prompt"] for sample in samples] == [f"{prompt} start:" for prompt in prompts]


# --- limits and faults


def test_an_episode_that_never_ends_is_cut(make_config, prompts):
    rows = [Prompt(prompt, {"fault": "never ends"}) for prompt in prompts]
    results = make_trainer(make_config, environment=Faulty, max_turns=3).ppo_step(rows)
    assert results["episode_turns"] == 3
    assert results["eos_rate"] == 0
    assert results["failed_rewards"] == 0


def test_the_last_token_of_an_episode_may_be_any(make_config, prompts):
    """Whatever the limit on tokens is, turns and observations never pass it."""
    for limit in range(4, 26):
        tokens = rollout(make_trainer(make_config, max_episode_tokens=limit), prompts).tokens
        assert int(tokens.sizes.max()) <= limit
        assert (tokens.mask.sum(1) > 0).all()


def test_the_value_after_a_cut_episode_is_read_after_its_observation(make_config, prompts):
    settings = {"environment": Faulty, "max_turns": 2, "cut_responses": "bootstrap"}
    rows = [Prompt(prompt, {"fault": "never ends"}) for prompt in prompts]
    trainer = make_trainer(make_config, **settings)
    tokens = trainer.ppo_step(rows)["sa_pairs"].tokens
    assert all(text.endswith(" again") for text in tokens.texts())
    assert make_trainer(make_config, **{**settings, "cut_responses": "terminal"}).ppo_step(rows)[
        "generated_texts"
    ] == [text.removesuffix(" again") for text in tokens.texts()]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_own_episode_and_says_why(make_config, prompts, fault, caplog):
    rows = [Prompt(prompt, {"fault": fault if i == 1 else ""}) for i, prompt in enumerate(prompts)]
    healthy = make_trainer(make_config, environment=Faulty).ppo_step(
        [Prompt(p, {"fault": ""}) for p in prompts]
    )
    caplog.clear()
    results = make_trainer(make_config, environment=Faulty).ppo_step(rows)
    assert results["failed_rewards"] == 1
    assert results["trained_rows"] == [0, 2, 3]
    assert [results["rewards"][i] for i in (0, 2, 3)] == [healthy["rewards"][i] for i in (0, 2, 3)]
    lines = [record.getMessage() for record in caplog.records if "failed for 1 of 4" in record.getMessage()]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert len(lines[0]) < 500
    assert "Faulty: " in lines[0]


def test_rewards_whose_sum_no_float32_holds_cost_their_episode(make_config, prompts, caplog):
    """The loss was nan."""
    rows = [Prompt(p, {"fault": "huge in sum" if i == 1 else ""}) for i, p in enumerate(prompts)]
    results = make_trainer(make_config, environment=Faulty).ppo_step(rows)
    assert results["trained_rows"] == [0, 2, 3]
    assert "1 of 4 samples are left out: the weighted sum of rewards is larger than" in caplog.text
    assert math.isfinite(results["policy_loss"])


def test_several_faults_are_all_named_and_counted(make_config, prompts, caplog):
    faults = ["raises", "returns None", "raises", ""]
    rows = [Prompt(prompt, {"fault": fault}) for prompt, fault in zip(prompts, faults, strict=True)]
    make_trainer(make_config, environment=Faulty, max_reward_failures=0.9).ppo_step(rows)
    assert "failed for 3 of 4 samples: Faulty: 2 x KeyError: 'lost'; 1 x " in caplog.text


def test_a_column_that_cannot_be_sent_to_a_process_is_refused_before_the_run(make_config, prompts):
    environment = make_trainer(make_config, environment=Faulty, step_seconds=5.0).generator.environment
    with pytest.raises(
        ValueError, match=r"the environment runs in worker.*'fault' of prompt 3 cannot be sent"
    ):
        environment.check([Prompt("p", {"fault": {1, 2}})], 3)
    environment.check([Prompt("p", {"fault": "", "unread": {1, 2}})], 3)


@pytest.mark.parametrize("fault", ["kills itself", "hangs"])
def test_a_process_that_dies_or_hangs_costs_one_episode(make_config, prompts, fault):
    rows = [Prompt(prompt, {"fault": fault if i == 2 else ""}) for i, prompt in enumerate(prompts)]
    results = make_trainer(make_config, environment=Faulty, step_seconds=2.0).ppo_step(rows)
    assert results["trained_rows"] == [0, 1, 3]
    own = make_trainer(make_config, environment=Faulty).ppo_step([Prompt(p, {"fault": ""}) for p in prompts])
    assert [results["rewards"][i] for i in (0, 1, 3)] == [own["rewards"][i] for i in (0, 1, 3)]


@pytest.mark.skipif(sys.platform != "linux", reason="the processes of other systems are less apart")
@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_code_costs_its_own_episode_at_most(make_config, prompts, fault, caplog):
    """In a process of its own, which shares nothing with that of another episode."""
    rows = [Prompt(prompt, {"fault": fault if i == 2 else ""}) for i, prompt in enumerate(prompts)]
    trainer = make_trainer(make_config, environment=Hostile, step_seconds=3.0)
    began = time.monotonic()
    results = trainer.ppo_step(rows)
    assert time.monotonic() - began < 3.0 + 2.0 + 15.0  # processes start and PPO runs beside
    assert {prompt[-2:] for prompt in results["sa_pairs"].tokens.prompts} == {" 1"}
    lines = [record.getMessage() for record in caplog.records if "failed for 1 of 4" in record.getMessage()]
    if fault in UNHARMED:
        assert results["trained_rows"] == [0, 1, 2, 3]
        assert lines == []
        return
    assert results["trained_rows"] == [0, 1, 3]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert len(lines[0]) < 500


@pytest.mark.parametrize(("limit", "trained"), [(4096, [0, 1, 3]), (0, [0, 1, 2, 3])])
@pytest.mark.skipif(sys.platform != "linux", reason="no limit of the address space")
def test_a_process_that_takes_too_much_memory_costs_one_episode(make_config, prompts, limit, trained, caplog):
    rows = [Prompt(prompt, {"fault": "takes 5 GiB" if i == 2 else ""}) for i, prompt in enumerate(prompts)]
    settings = {"environment": Faulty, "step_seconds": 20.0, "step_memory_mb": limit}
    results = make_trainer(make_config, **settings).ppo_step(rows)
    assert results["trained_rows"] == trained
    assert ("Faulty: memory: " in caplog.text) == (limit > 0)


def test_a_column_that_reset_needs_is_asked_for(make_config, prompts):
    class Needs(Parity):
        def reset(self, level):
            pass

    trainer = make_trainer(make_config, environment=Needs)
    with pytest.raises(
        ValueError, match="reset of the environment asks for 'level', but the columns of prompt 0"
    ):
        trainer.train(prompts)


@pytest.mark.long
@pytest.mark.timeout(280)
def test_of_a_thousand_episodes_only_the_faulty_are_lost(make_config):
    faults = [*FAULTS, *[""] * len(FAULTS)]
    rows = [Prompt(f"episode {i}", {"fault": faults[i * 7 % len(faults)]}) for i in range(1000)]
    trainer = make_trainer(make_config, environment=Faulty, max_reward_failures=1.0)
    lost = []
    for start in range(0, 1000, 250):
        results = trainer.ppo_step(rows[start : start + 250])
        trained = set(results["trained_rows"])
        lost += [start + row for row in range(250) if row not in trained]
    assert lost == [i for i, row in enumerate(rows) if row.columns["fault"]]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="no limit of the address space")
@pytest.mark.parametrize("seed", [0])
def test_of_a_thousand_episodes_in_processes_only_the_faulty_are_lost(make_config, seed):
    """Each in a process of its own, with faults drawn by chance, those that end or hold a process among
    them."""
    draw, faults = random.Random(seed), [*FAULTS, *KILLED, *HARMLESS[1:]]
    drawn = [draw.choice(faults) if draw.random() < 0.3 else "" for _ in range(1000)]
    assert {*faults} <= {*drawn}
    rows = [Prompt(f"episode {i}", {"fault": fault}) for i, fault in enumerate(drawn)]
    settings = {"max_reward_failures": 1.0, "step_seconds": 15.0, "step_memory_mb": 4096}
    trainer = make_trainer(make_config, environment=Faulty, max_turns=3, **settings)
    lost = []
    for start in range(0, 1000, 250):
        results = trainer.ppo_step(rows[start : start + 250])
        trained = set(results["trained_rows"])
        lost += [start + row for row in range(250) if row not in trained]
    assert lost == [i for i, fault in enumerate(drawn) if fault not in HARMLESS]


# --- resuming


def test_a_killed_run_resumes_to_the_same_bits(make_config, prompts):
    settings = {"batch_size": 4, "checkpoint_every": 1, "run_name": "killed", "max_turns": 2}
    whole = make_trainer(make_config, **{**settings, "run_name": "whole"})
    whole.train(prompts * 3)
    killed = crash_at(make_trainer(make_config, **settings), 2)
    with pytest.raises(Crash):
        killed.train(prompts * 3)
    resumed = make_trainer(make_config, **settings)
    resumed.train(prompts * 3, resume=True)
    assert difference(weights(whole), weights(resumed)) == 0


def test_held_out_prompts_are_played_and_records_show_the_turns(make_config, prompts):
    trainer = make_trainer(make_config, batch_size=4, run_name="played", max_turns=2)
    results = trainer.train(prompts, validation_prompts=prompts[:2])
    assert 0 <= results.start["validation/reward"] <= 2
    run = Run(results.run_folder)
    for record in run.tokens(1):
        assert [turn["role"] for turn in record["replies"]] == ["assistant", "environment", "assistant"]
        assert "".join(turn["text"] for turn in record["replies"]) == "".join(record["tokens"])
    page = write_report(run)
    assert "environment" in page.read_text(encoding="utf-8")
