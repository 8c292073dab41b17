"""Rewards: specs in every form, sources, columns, async functions, per-token rewards, and what happens when
they fail."""

import asyncio
import functools
import json
import math
import sys

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from proxima.cli import parse
from proxima.config import PPOConfig, RewardSpec
from proxima.core.errors import RewardFailure
from proxima.core.types import Prompt
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards import Samples, check_rewards, open_reward
from proxima.rewards.function_reward import FunctionReward
from proxima.rewards.ready_made_rewards import READY_MADE
from proxima.rewards.reward_outcome import read_rewards
from tests.conftest import count_e
from tests.helpers import difference, weights

NAN = float("nan")

# --- specs ---

TEXTS = [
    ("a:f", RewardSpec("a:f")),
    ("a:f,name=g", RewardSpec("a:f", 1.0, "g")),
    (
        "0.5*length_band,low=5,high=40,name=size",
        RewardSpec("length_band", 0.5, "size", {"low": 5, "high": 40}),
    ),
    (
        "http://127.0.0.1:8000/score,timeout=5",
        RewardSpec("http://127.0.0.1:8000/score", options={"timeout": 5}),
    ),
    ("https://h/a,b,timeout=2.5", RewardSpec("https://h/a,b", options={"timeout": 2.5})),
    (
        r"regex,pattern=^a.*: \d+$,mode=fullmatch",
        RewardSpec("regex", options={"pattern": r"^a.*: \d+$", "mode": "fullmatch"}),
    ),
    ("regex,pattern=[abc]{2}", RewardSpec("regex", options={"pattern": "[abc]{2}"})),
    (
        "org/judge,label='1',chat=true,max_length=null",
        RewardSpec("org/judge", options={"label": "1", "chat": True, "max_length": None}),
    ),
    ("regex,pattern=2024-01-01", RewardSpec("regex", options={"pattern": "2024-01-01"})),
]


@pytest.mark.parametrize(("text", "spec"), TEXTS)
def test_a_spec_is_the_same_as_text_mapping_yaml_and_on_the_command_line(tmp_path, text, spec):
    assert RewardSpec.of(text) == spec
    named = RewardSpec(
        spec.source, spec.weight, spec.label, spec.options
    )  # written down, a name is always there
    assert RewardSpec.of(spec.to_dict()) == RewardSpec.of(spec.to_text()) == named
    config = PPOConfig(rewards=[text])
    assert PPOConfig.from_dict(config.to_dict()).rewards == (named,)
    config.to_yaml(tmp_path / "c.yaml")
    assert PPOConfig.from_yaml(tmp_path / "c.yaml").rewards == (named,)
    assert parse(["train", "--data", "x", "--rewards", text]).ppo.rewards == (spec,)
    assert parse(["train", "--data", "x", "--config", str(tmp_path / "c.yaml")]).ppo.rewards == (named,)
    assert hash(spec) == hash(RewardSpec.of(text))


def test_numbers_keep_their_value_in_a_specs_text():
    spec = RewardSpec("a:f", 1e-7, "n", {"x": 1e-5, "y": -3, "z": "1e-5", "q": "it's: 'x'"})
    assert RewardSpec.of(spec.to_text()) == spec


def test_a_yaml_list_of_rewards_as_a_user_writes_it(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "rewards:\n- {source: length_band, weight: 0.5, name: size, options: {low: 5, high: 40}}\n- "
        "my:reward\n"
    )
    assert PPOConfig.from_yaml(tmp_path / "c.yaml").rewards == (
        RewardSpec("length_band", 0.5, "size", {"low": 5, "high": 40}),
        RewardSpec("my:reward"),
    )


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("http://h:8/score", "score"),
        ("https://h.org/", "h.org"),
        ("http://h/a/b/?k=v", "b"),
        ("HTTP://h/x", "x"),
    ],
)
def test_a_url_is_not_a_function_and_its_name_is_its_path(url, label):
    spec = RewardSpec(url)
    assert (spec.label, spec.is_http, spec.is_function) == (label, True, False)


def plain(prompts, completions):
    return [0.0] * len(completions)


def with_options(prompts, completions, scale: float = 1.0, *, shift: int):
    return [scale + shift for _ in completions]


BAD_SPECS = [
    ("lenght_band", r"unknown reward 'lenght_band'.*length_band, regex, repetition, ends_with_eos"),
    ("length_band,low=5", "needs the option 'high'"),
    ("length_band,low=5,hihg=4", r"needs the option 'high'|has no option 'hihg'"),
    ("length_band,low=1,high=4,top=3", r"no option 'top'; it takes low \(int\), high \(int\)"),
    (
        "length_band,low=1.5,high=4",
        r"option low \(1.5\) of reward 'length_band' must be of type int; it takes low",
    ),
    ("length_band,low=true,high=4", r"option low \(True\)"),
    ("length_band,low=9,high=4", "low <= high"),
    ("regex,pattern=(", r"the regex '\(' is not a pattern"),
    ("regex,pattern=a,mode=find", "mode of a regex"),
    ("repetition,n=0", "must be at least 1"),
    ("ends_with_eos,n=1", "no option 'n'; it takes none"),
    ("http://h/x,time=3", r"no option 'time'; it takes timeout \(float\), retries \(int\)"),
    ("http://h/x,timeout=soon", r"option timeout \('soon'\)"),
    ("http://h/x,timeout=0", "positive number of seconds"),
    ("http://h/x,retries=-1", "at least 0"),
    ("http://h/x,batch=0", "at least 1"),
    ("http://user:word@h/x", "no user or password"),
    ("http:///x", "needs a host"),
    (
        "org/judge,labels=1",
        r"no option 'labels'; it takes label \(int \| str \| None\), max_length \(int\), chat \(bool\)",
    ),
    ("no_such_module:f", "cannot load the reward 'no_such_module:f'"),
    ("my_rewards.py:f", "names a file; write my_rewards:f, and run where my_rewards.py lies"),
    (__file__, "is a file; a function in it is MODULE:FUNCTION"),
    ({"source": plain, "options": {"x": 1}}, "'plain' has no option 'x'; it takes none"),
    (
        {"source": with_options, "options": {"scal": 1}},
        r"no option 'scal'; it takes scale \(float\), shift \(int\)",
    ),
    ({"source": with_options, "options": {"shift": "much"}}, r"option shift \('much'\)"),
    ({"source": lambda texts: [], "name": "one"}, r"must take \(prompts, completions\), it takes \(texts\)"),
]


@pytest.mark.parametrize(("spec", "message"), BAD_SPECS)
def test_what_is_wrong_with_a_reward_is_said_before_any_model_is_loaded(spec, message):
    config = PPOConfig(model_name="no/such-model", rewards=[spec])
    for call in (check_rewards, PPOTrainer):
        with pytest.raises(ValueError, match=message):
            call(config)


def test_options_that_are_no_mapping_are_refused():
    with pytest.raises(ValueError, match="must be `name: value`, got a list"):
        RewardSpec("a:f", options=["low"])


# --- what a function is given ---


def samples(columns=({},) * 3, completion_ids=((1, 2), (3,), (4, 5, 6)), ended=(True, False, True)):
    prompts = [Prompt(f"p{i}", row) for i, row in enumerate(columns)]
    return Samples(
        prompts, [f"c{i}" for i in range(len(prompts))], [list(row) for row in completion_ids], list(ended)
    )


def call(function, given=None, **options):
    source = FunctionReward(RewardSpec(function, name="f", options=options), function)
    given = given or samples()
    source.check(given.prompts)
    return source(given)


ANSWERS = [{"answer": "A", "n": 1}, {"answer": "B", "n": 2}, {"answer": "C", "n": 3, "rare": 9}]
PROMPTS, COMPLETIONS = ["p0", "p1", "p2"], ["c0", "c1", "c2"]


def record(seen):
    """Functions of every shape that note what they were given."""

    def note(**given):
        seen.update(given)
        return [1.0, 2.0, 3.0]

    def by_place(a, b):
        return note(prompts=a, completions=b)

    def usual(prompts, texts):
        return note(prompts=prompts, completions=texts)

    def exchanged(completions, prompts):
        return note(prompts=prompts, completions=completions)

    def by_keyword(*, completions, prompts):
        return note(prompts=prompts, completions=completions)

    def positional_only(a, b, /):
        return note(prompts=a, completions=b)

    class Judge:
        def __call__(self, prompts, completions):
            return note(prompts=prompts, completions=completions)

    def scaled(prompts, completions, scale):
        return note(prompts=prompts, completions=completions)

    return [
        by_place, usual, exchanged, by_keyword, positional_only, Judge(), Judge().__call__, functools.partial(scaled, scale=2),
        lambda *both: note(prompts=both[0], completions=both[1]),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(9))
def test_prompts_and_completions_reach_functions_of_every_shape(number):
    seen: dict = {}
    assert call(record(seen)[number]).sequence == [1.0, 2.0, 3.0]
    assert (seen["prompts"], seen["completions"]) == (PROMPTS, COMPLETIONS)


def test_columns_ids_ends_and_options_go_to_the_parameters_that_name_them():
    seen: dict = {}

    def reward(
        prompts, completions, answer, completion_ids, ended, n=None, other="default", factor: float = 1.0
    ):
        seen.update(locals())
        return [0.0] * 3

    call(reward, samples(ANSWERS), factor=3)
    assert seen["answer"] == ["A", "B", "C"]
    assert seen["n"] == [1, 2, 3]
    assert seen["completion_ids"] == [[1, 2], [3], [4, 5, 6]]
    assert seen["ended"] == [True, False, True]
    assert (seen["other"], seen["factor"]) == ("default", 3.0)
    call(reward, samples(ANSWERS), answer="an option wins over a column")
    assert seen["answer"] == "an option wins over a column"


def test_any_keyword_gets_all_common_columns_and_no_others():
    seen: dict = {}
    call(lambda prompts, completions, **rest: seen.update(rest) or [0.0] * 3, samples(ANSWERS), level=2)
    assert seen == {"answer": ["A", "B", "C"], "n": [1, 2, 3], "level": 2}
    call(
        lambda completions, **rest: seen.update(rest) or [0.0] * 3, samples([{"prompts": 1}] * 3)
    )  # no clash


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([{}, {}, {}], r"'f' asks for 'answer', but the columns of prompt 0 \('p0'\) are: none"),
        ([{"answer": 1}, {"answer": 2}, {"n": 3}], r"prompt 2 \('p2'\) are: n"),
    ],
)
def test_a_column_that_is_not_there_is_an_error_that_names_it(columns, message):
    with pytest.raises(ValueError, match=message):
        call(lambda prompts, completions, answer: [0.0] * 3, samples(columns))


def test_a_column_with_a_default_may_be_missing_everywhere_but_not_in_some_rows():
    assert call(lambda prompts, completions, rare=5: [rare] * 3).sequence == [5, 5, 5]
    with pytest.raises(ValueError, match="asks for 'rare'"):
        call(lambda prompts, completions, rare=5: [rare] * 3, samples(ANSWERS))


def test_a_missing_column_stops_a_run_before_it_trains_and_is_not_counted_as_a_failure(make_config):
    def exact(prompts, completions, answer):
        return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    trainer = PPOTrainer(make_config(rewards=(exact,)))
    before = weights(trainer)
    with pytest.raises(ValueError, match="'exact' asks for 'answer'"):
        trainer.train(["no columns here"])
    assert difference(before, weights(trainer)) == 0
    results = trainer.ppo_step([Prompt("a", {"answer": "x"}), Prompt("b", {"answer": "y"})])
    assert results["avg_reward"] == 0.0


def test_a_missing_column_stops_training_before_there_is_a_run(make_config, tmp_path):
    def exact(prompts, texts, answer):
        return [0.0] * len(texts)

    trainer = PPOTrainer(make_config(rewards=(exact,), run_dir=str(tmp_path / "runs")))
    good, bad = Prompt("a", {"answer": "x"}), Prompt("b")
    for training, held_out in (([good, bad], None), ([good], [bad])):
        with pytest.raises(ValueError, match="'exact' asks for 'answer'"):
            trainer.train(training, 1, held_out)
        assert not (tmp_path / "runs").exists()


def test_a_prompt_that_is_cut_keeps_its_columns(make_config):
    seen = []

    def reward(prompts, completions, answer):
        seen.extend(zip(prompts, answer, strict=True))
        return [0.0] * len(prompts)

    PPOTrainer(make_config(rewards=(reward,), truncate_prompts=True)).ppo_step(
        [Prompt("x" * 400, {"answer": 7})]
    )
    assert seen == [("x" * 250, 7)]


@pytest.mark.parametrize("inside_a_loop", [False, True])
def test_an_async_function_is_awaited_in_a_notebook_too(make_config, prompts, inside_a_loop):
    loops = []

    async def slow_length(prompts, completions):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0.001)
        return [float(len(text)) for text in completions]

    trainer = PPOTrainer(make_config(rewards=(slow_length,)))

    async def notebook():
        return trainer.ppo_step(prompts), trainer.ppo_step(prompts)

    results = (
        asyncio.run(notebook())[0]
        if inside_a_loop
        else (trainer.ppo_step(prompts), trainer.ppo_step(prompts))[0]
    )
    assert results["rewards"] == [float(len(text)) for text in results["generated_texts"]]
    assert loops[0] is loops[1]  # so a client may keep its connections


def test_an_async_function_that_raises_is_tried_again_and_counted(make_config, prompts):
    calls = []

    async def away(prompts, completions):
        calls.append(1)
        raise ConnectionError("the judge is away")

    with pytest.raises(RewardFailure, match="away: ConnectionError: the judge is away"):
        PPOTrainer(make_config(rewards=(away,))).ppo_step(prompts)
    assert len(calls) == 2


async def leaves(prompts, completions):
    raise SystemExit


async def stops(prompts, completions):
    raise KeyboardInterrupt


def quits(prompts, completions):
    sys.exit()


def babbles(prompts, completions):
    raise ValueError("one\ntwo " + 9999 * "x")


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (leaves, "RuntimeError: it ended by SystemExit"),
        (stops, "RuntimeError: it ended by KeyboardInterrupt"),
        (quits, "SystemExit"),
        (babbles, "ValueError: one two x"),
    ],
)
def test_a_reward_that_ends_the_process_or_babbles_only_fails(make_config, prompts, reward, reason):
    with pytest.raises(RewardFailure, match=f"the last reason: {reward.__name__}: {reason}") as problem:
        PPOTrainer(make_config(rewards=(reward,))).ppo_step(prompts)
    assert len(str(problem.value)) < 500
    assert "\n" not in str(problem.value)


def test_what_a_reward_does_to_its_arguments_changes_nothing_else(make_config, prompts):
    def spoils(prompts, completions, completion_ids, ended):
        for items in (*completion_ids, prompts, completions, completion_ids, ended):
            items.clear()
        return [1.0] * 4

    results = PPOTrainer(make_config(rewards=(spoils, ramp))).ppo_step(prompts)
    assert results["failed_rewards"] == 0
    assert results["reward/ramp"] > 0


def test_a_reward_file_in_the_current_folder_can_be_named(tmp_path, monkeypatch):
    (tmp_path / "beside_me.py").write_text(
        "def brevity(prompts, completions, scale=1):\n    return [-scale for _ in prompts]\n"
    )
    (tmp_path / "broken_reward.py").write_text("def brevity(:\n")
    (tmp_path / "script_reward.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = list(sys.path)
    source = open_reward(RewardSpec.of("beside_me:brevity,scale=2"), FakeModel, None, PPOConfig())
    assert source(samples()).sequence == [-2.0, -2.0, -2.0]
    with pytest.raises(ValueError, match=r"broken_reward:brevity.*SyntaxError"):
        check_rewards(PPOConfig(rewards="broken_reward:brevity"))
    with pytest.raises(ValueError, match=r"script_reward:f.*SystemExit"):
        check_rewards(PPOConfig(rewards="script_reward:f"))
    assert sys.path == path


class FakeModel:
    source, device = "untrained", torch.device("cpu")


# --- what a function returns ---


@pytest.mark.parametrize(
    ("returned", "sequence", "token"),
    [
        ([1, 2.5, True], [1.0, 2.5, 1.0], {}),
        ((1, None, 3), [1.0, NAN, 3.0], {}),
        (torch.tensor([1.0, NAN, math.inf], requires_grad=True), [1.0, NAN, NAN], {}),
        (torch.tensor([1, 2, 3]).numpy(), [1.0, 2.0, 3.0], {}),
        (["1", b"2", {}], [NAN, NAN, NAN], {}),
        ([10**400, 1j, float("-inf")], [NAN, NAN, NAN], {}),
        ([1e39, -1e308, 1e38], [NAN, NAN, 1e38], {}),  # losses are float32
        ([[1, 2], [3], [4, 5, 6]], [0.0, 0.0, 0.0], {0: [1, 2], 1: [3], 2: [4, 5, 6]}),
        ([[1, 2], 7, torch.ones(3)], [0.0, 7.0, 0.0], {0: [1, 2], 2: [1, 1, 1]}),
        ([[1], [3, 3], [4, NAN, 6]], [NAN, NAN, NAN], {}),
        ([[1, "2"], [], [None, 1, 1]], [NAN, NAN, NAN], {}),
    ],
)
def test_each_entry_is_read_alone_and_nothing_is_imputed(returned, sequence, token):
    outcome = read_rewards(returned, [2, 1, 3])
    assert outcome.sequence == pytest.approx(sequence, nan_ok=True)
    assert outcome.token == token
    assert bool(outcome.reason) == any(map(math.isnan, sequence))


@pytest.mark.parametrize(
    "returned", [None, 1.0, [1.0], [1.0] * 4, {"a": 1}, "123", torch.tensor(1.0), (x for x in range(3))]
)
def test_a_wrong_number_of_rewards_is_an_error(returned):
    with pytest.raises(ValueError, match="it returned"):
        read_rewards(returned, [2, 1, 3])


# --- per-token rewards ---


def ramp(prompts, completions, completion_ids):
    """0.1, 0.2, 0.3, ... on the tokens of each response."""
    return [[0.1 * (i + 1) for i in range(len(ids))] for ids in completion_ids]


def ones(prompts, completions):
    return [1.0] * len(completions)


SOME_END = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 12}  # so that lengths differ
MANY = [f"prompt {i}" for i in range(48)]


def test_per_token_rewards_land_on_their_tokens_and_sequence_rewards_on_the_last(make_config):
    config = make_config(rewards=[RewardSpec(ramp, 2.0), RewardSpec(ones, -3.0)], **SOME_END, kl_coef=0.5)
    results = PPOTrainer(config).ppo_step(MANY)
    pairs = results["sa_pairs"]
    lengths = pairs.lengths.tolist()
    assert len(set(lengths)) > 1
    for row, length in enumerate(lengths):
        by_hand = [2.0 * 0.1 * (i + 1) for i in range(length)]
        by_hand[-1] += -3.0
        kl = pairs.column("kl")[row, :length]
        assert (pairs.column("reward")[row, :length] + 0.5 * kl).tolist() == pytest.approx(by_hand, abs=1e-5)
    totals = [2.0 * 0.1 * n * (n + 1) / 2 - 3.0 for n in lengths]
    assert results["rewards"] == pytest.approx(totals)
    assert results["avg_reward"] == pytest.approx(sum(totals) / len(totals))
    assert results["reward/ramp"] == pytest.approx(sum(0.1 * n * (n + 1) / 2 for n in lengths) / len(lengths))
    assert results["reward/ones"] == 1.0


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({"missing_eos_penalty": 4.0}, lambda ended: 1.0 - 4.0 * (not ended)),
        ({"clip_rewards": 0.25}, lambda ended: 0.25),
        ({"normalize_rewards": True}, lambda ended: 0.0),
    ],
)
def test_penalty_clipping_and_normalisation_act_on_the_sequence_part_only(make_config, settings, last):
    config = make_config(rewards=[ramp, ones], **SOME_END, kl_coef=0.0, **settings)
    pairs = PPOTrainer(config).ppo_step(MANY)["sa_pairs"]
    for row, (length, ended) in enumerate(
        zip(pairs.lengths.tolist(), pairs.tokens.ended.tolist(), strict=True)
    ):
        by_hand = [0.1 * (i + 1) for i in range(length)]
        by_hand[-1] += last(ended)
        assert pairs.column("reward")[row, :length].tolist() == pytest.approx(by_hand, abs=1e-5)


def test_a_sequence_whose_per_token_rewards_fail_is_left_out_and_the_others_keep_theirs(make_config):
    def some(prompts, completions, completion_ids):
        rows = ramp(prompts, completions, completion_ids)
        rows[1], rows[3] = rows[1] + [1.0], None  # one too many; none at all
        return rows

    results = PPOTrainer(make_config(rewards=[some, ones], **SOME_END, kl_coef=0.0)).ppo_step(MANY)
    pairs = results["sa_pairs"]
    assert results["failed_rewards"] == 2
    assert [i for i, reward in enumerate(results["rewards"]) if math.isnan(reward)] == [1, 3]
    assert pairs.tokens.prompts == [prompt for i, prompt in enumerate(MANY) if i not in (1, 3)]
    for row, length in enumerate(pairs.lengths.tolist()):
        by_hand = [0.1 * (i + 1) for i in range(length)]
        by_hand[-1] += 1.0
        assert pairs.column("reward")[row, :length].tolist() == pytest.approx(by_hand, abs=1e-5)


def test_one_number_per_token_on_the_last_token_trains_as_one_number_per_sequence(make_config, prompts):
    def last_only(prompts, completions, completion_ids):
        scores = count_e(prompts, completions)
        return [[0.0] * (len(ids) - 1) + [score] for ids, score in zip(completion_ids, scores, strict=True)]

    trainers = [PPOTrainer(make_config(rewards=(reward,))) for reward in (count_e, last_only)]
    for trainer in trainers:
        trainer.ppo_step(prompts)
    assert difference(*map(weights, trainers)) == 0


def test_plain_texts_are_tokenised_for_per_token_rewards(make_config):
    computer = PPOTrainer(make_config(rewards=[ramp, RewardSpec(ones, 2.0)])).reward_computer
    assert computer.compute_rewards(["p", "q"], ["abc", "z"]) == pytest.approx(
        [0.6 + 2.0, 0.1 + 2.0]
    )  # a token a byte
    assert computer.compute_rewards(["p", "q"], ["abc", "z"], normalize=True) == pytest.approx([0.6, 0.1])
    assert computer.compute_rewards(["whole text"]) == pytest.approx([2.0])


# --- ready-made ---


def ready(name, completion_ids=(), completions=(), ended=(), **options):
    count = max(map(len, (completion_ids, completions, ended)))
    given = Samples(
        ["p"] * count,
        list(completions or [""] * count),
        list(completion_ids or [[]] * count),
        list(ended or [True] * count),
    )
    return open_reward(RewardSpec(name, options=options), FakeModel, None, PPOConfig())(given).sequence


@pytest.mark.parametrize(
    ("length", "score"),
    [
        (0, 0.0),
        (1, 0.25),
        (2, 0.5),
        (4, 1.0),
        (7, 1.0),
        (10, 1.0),
        (11, 0.9),
        (15, 0.5),
        (20, 0.0),
        (99, 0.0),
    ],
)
def test_length_band(length, score):
    assert ready("length_band", [[7] * length], low=4, high=10) == [pytest.approx(score)]


def test_length_band_from_nothing():
    assert ready("length_band", [[], [1], [1, 1]], low=0, high=1) == [1.0, 1.0, 0.0]


def test_regex():
    texts = ["42", "is 42.", "none"]
    assert ready("regex", completions=texts, pattern=r"\d+") == [1.0, 1.0, 0.0]
    assert ready("regex", completions=texts, pattern=r"\d+", mode="fullmatch") == [1.0, 0.0, 0.0]
    assert ready("regex", completions=["x" * 30_000 + "y"], pattern="y") == [
        0.0
    ]  # only the beginning is read


def test_a_catastrophic_pattern_fails_in_time():
    import time

    start = time.monotonic()
    [slow, quick] = ready("regex", completions=["a" * 60 + "b", "aa"], pattern="(a|aa)+$")
    assert math.isnan(slow)
    assert quick == 1.0
    assert time.monotonic() - start < 10


def test_repetition_and_ends_with_eos():
    rows = [[1, 2, 3, 4], [1, 1, 1, 1, 1], [5, 6, 5, 6, 5], [1, 2], []]
    assert ready("repetition", rows) == pytest.approx([0.0, -2 / 3, -1 / 3, 0.0, 0.0])
    assert ready("repetition", rows, n=1) == pytest.approx([0.0, -0.8, -0.6, 0.0, 0.0])
    assert ready("ends_with_eos", ended=[True, False]) == [1.0, 0.0]


def test_ready_made_rewards_train_by_name(make_config):
    specs = ["0.5*length_band,low=2,high=4", "regex,pattern=e", "repetition,n=2", "ends_with_eos"]
    results = PPOTrainer(make_config(rewards=specs, **SOME_END)).ppo_step(MANY)
    assert {f"reward/{name}" for name in READY_MADE} <= set(results)
    assert results["reward/ends_with_eos"] == pytest.approx(results["eos_rate"])
    expected = 0.5 * results["reward/length_band"] + sum(
        results[f"reward/{name}"] for name in ("regex", "repetition", "ends_with_eos")
    )
    assert results["avg_reward"] == pytest.approx(expected)


# --- classifiers ---


@pytest.fixture(scope="module")
def judge(tiny_folders, tmp_path_factory):
    """A classifier of three labels with a chat template."""
    folder = str(tmp_path_factory.mktemp("judge"))
    names = {0: "bad", 1: "fair", 2: "good"}
    network = AutoModelForSequenceClassification.from_pretrained(tiny_folders["gpt2"], id2label=names)
    network.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folders["gpt2"])
    tokenizer.chat_template = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}<end>"
    tokenizer.save_pretrained(folder)
    return folder


def classify(judge, prompts, completions, **options):
    source = open_reward(
        RewardSpec(judge, options={"eos": "leave", **options}), FakeModel, None, PPOConfig(micro_batch_size=2)
    )
    tokenizer = AutoTokenizer.from_pretrained(judge)
    return source(Samples.of_texts(prompts, completions, tokenizer)).sequence


def logits(judge, text):
    network, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(judge),
        AutoTokenizer.from_pretrained(judge),
    )
    with torch.no_grad():
        return network(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0].tolist()


def test_a_classifier_of_several_labels_needs_to_be_told_which(judge):
    with pytest.raises(ValueError, match=r"has 3 labels: 0 \(bad\), 1 \(fair\), 2 \(good\); .* label="):
        classify(judge, ["a"], ["b"])
    for wrong in (3, -1, "great"):
        with pytest.raises(ValueError, match=f"no label {wrong!r}; it has 0 .bad."):
            classify(judge, ["a"], ["b"], label=wrong)
    expected = [logits(judge, text) for text in ("ab", "longer text", "x!")]
    for label, index in ((0, 0), ("good", 2), (2, 2)):
        scores = classify(judge, ["a", "longer ", "x"], ["b", "text", "!"], label=label)
        assert scores == pytest.approx([row[index] for row in expected], abs=1e-4)


def test_a_chat_template_writes_the_turns(judge, tiny_folders, tmp_path):
    scores = classify(judge, ["ask"], ["answer"], label=1, chat=True)
    assert scores == pytest.approx([logits(judge, "<user>ask<assistant>answer<end>")[1]], abs=1e-4)
    bare = AutoModelForSequenceClassification.from_pretrained(tiny_folders["gpt2"], num_labels=1)
    bare.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_folders["gpt2"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no chat template"):
        classify(str(tmp_path), ["ask"], ["answer"], chat=True)
    assert classify(str(tmp_path), ["ask"], ["answer"], label="LABEL_0") == classify(
        str(tmp_path), ["ask"], ["answer"]
    )


def test_a_text_that_is_too_long_fails_alone_unless_it_may_be_cut(judge):
    long = "x" * 300 + "end"
    scores = classify(judge, ["a", long, "b"], ["c", "d", "e"], label=0)
    assert [math.isnan(score) for score in scores] == [False, True, False]
    cut = classify(judge, [long], ["d"], label=0, max_length=50)
    assert cut == pytest.approx([logits(judge, (long + "d")[-50:])[0]], abs=1e-4)
    with pytest.raises(ValueError, match=r"max_length \(300\) is more than the reward model's 256"):
        classify(judge, ["a"], ["b"], label=0, max_length=300)


# --- failures ---


def fails_for(count):
    def reward(prompts, completions):
        return [NAN if i < count else 1.0 + i for i in range(len(prompts))]

    return reward


@pytest.mark.parametrize(
    ("failing", "allowed", "stops"),
    [(2, 0.5, False), (3, 0.5, True), (1, 0.0, True), (0, 0.0, False), (3, 1.0, False), (4, 1.0, True)],
)
def test_the_share_of_failures_that_a_step_may_have(make_config, prompts, failing, allowed, stops):
    trainer = PPOTrainer(
        make_config(rewards=(fails_for(failing),), max_reward_failures=allowed, ppo_epochs=1)
    )
    before = weights(trainer)
    if not stops:
        results = trainer.ppo_step(prompts)
        assert (results["failed_rewards"], len(results["sa_pairs"].tokens.prompts)) == (failing, 4 - failing)
        assert difference(before, weights(trainer)) > 0
        return
    with pytest.raises(
        RewardFailure, match=f"{'all' if failing == 4 else f'{failing} of'} 4 rewards of step 1 failed"
    ) as problem:
        trainer.ppo_step(prompts)
    assert "the last reason: reward: not a finite number but nan" in str(problem.value)
    assert difference(before, weights(trainer)) == 0
    assert trainer.step == 0


def test_a_stopped_run_says_how_many_failed_why_and_where_the_weights_are(make_config, tmp_path):
    calls = []

    def dies(prompts, completions):
        calls.append(1)
        if len(calls) > 1:
            raise OSError("disk full")
        return [1.0] * len(prompts)

    trainer = PPOTrainer(make_config(rewards=(dies,), batch_size=2, run_name="stopped"))
    with pytest.raises(RewardFailure) as problem:
        trainer.train(["a", "b", "c", "d"])
    folder = tmp_path / "runs" / "stopped"
    message = str(problem.value)
    assert "all 2 rewards of step 2 failed" in message
    assert "dies: OSError: disk full" in message
    assert f"are in {folder}" in message
    assert (folder / "policy" / "adapter_model.safetensors").is_file()
    assert (folder / "value" / "head.safetensors").is_file()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(("lost", "counts"), [(1, True), (2, True), (3, False), (4, False)])
def test_validation_that_fails_is_never_the_best_and_never_a_crash(make_config, lost, counts):
    def away_on_validation(prompts, completions):
        held_out = [prompt.startswith("held") for prompt in prompts]
        return [None if held and i < lost else 1.0 for i, held in enumerate(held_out)]

    trainer = PPOTrainer(make_config(rewards=(away_on_validation,), batch_size=2, ppo_epochs=1))
    results = trainer.train(["a", "b", "c", "d"], validation_prompts=[f"held {i}" for i in range(4)])
    assert results.stop_reason == "all epochs done"
    assert results.best_step == 0  # nothing beat the model it began with
    logged = [
        json.loads(line)["validation/reward"]
        for line in (results.run_folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert logged == [1.0 if counts else None] * 3
