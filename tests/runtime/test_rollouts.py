"""Rollouts on servers that answer, lie, stall, die and come back; importance weights; overlap.

vLLM itself: tests/engines.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proxima.config import PPOConfig, RewardSpec
from proxima.core.errors import EngineFailure
from proxima.core.retries import RetryPolicy
from proxima.core.sampling import (
    Sampling,
    include_sampled,
    kept_logits,
    sequence_keys,
    token_logprobs,
    truncate,
)
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.vllm import server_pool as servers_module
from proxima.runtime.vllm.in_process_engine import supported_rank
from proxima.runtime.vllm.rollout_job import InvalidResponse, RolloutJob, WeightCheck, parse_response
from proxima.runtime.vllm.vllm_rollouts import sequence_seeds
from proxima.training import importance_weights
from proxima.world.tiny_models import make_tiny_model
from tests.helpers import LOGPROB_ROUNDING, Crash, crash_at, difference, rounding, shake, weights
from tests.rollout_server import RolloutServer, is_sampling, stalls
from tests.runtime.test_processes import torchrun


@pytest.fixture
def serve(tiny):
    """A started server; all are stopped at the end."""
    started = []

    def start(fault=None, model=tiny, **settings):
        started.append(RolloutServer(model, fault, **settings))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def on_servers(make_config):
    def make(*servers, **settings):
        return make_config(engine="vllm", engine_urls=tuple(server.url for server in servers), **settings)

    return make


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(servers_module, "BACKOFF", RetryPolicy(first_wait=0.05, longest_wait=0.1))


# --- formulas ---


def test_weights_are_those_of_the_formula_in_plain_numbers():
    ours, theirs, cap = [[-1.0, -0.5, -9.0], [-0.1, -3.0, 0.0]], [[-1.2, -2.5, -0.1], [-0.1, -2.0, -0.5]], 2.0
    weights_, cut = importance_weights(torch.tensor(ours), torch.tensor(theirs), cap)
    for row in range(2):
        for column in range(3):
            exact = math.exp(ours[row][column]) / math.exp(theirs[row][column])
            assert float(weights_[row, column]) == pytest.approx(min(exact, cap), rel=1e-6)
            assert bool(cut[row, column]) == (exact > cap)
    assert importance_weights(torch.tensor([0.0]), torch.tensor([-1e4]), 3.0)[0].item() == pytest.approx(3.0)


def test_the_loss_of_a_token_is_multiplied_by_its_weight(make_config, prompts):
    trainer = shake(PPOTrainer(make_config()))
    rollout, _ = trainer.generator.generate_sequences(prompts)
    pairs = trainer.value_adder.add_values_to_sa_pairs(rollout)
    advantages, chosen = torch.randn(rollout.mask.shape), torch.rand(rollout.mask.shape) * 2
    pairs = pairs.with_columns(advantage=advantages)
    pairs = pairs.with_columns(**{"return": advantages, "importance": chosen})
    stats = trainer.model_trainer._minibatch(pairs, value=False)
    real = rollout.mask.flatten().tolist()
    terms = [
        -w * a
        for w, a, here in zip(chosen.flatten().tolist(), advantages.flatten().tolist(), real, strict=True)
        if here
    ]  # the ratio is 1 before the first optimiser step
    assert float(stats["policy_loss"]) == pytest.approx(sum(terms) / len(terms), rel=1e-4)


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (5, 0.5), (0, 0.5)])
def test_a_kept_set_is_extended_by_the_token_that_was_chosen(top_k, top_p):
    scaled = torch.randn(40, 17, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(40) % 17
    kept, outside = include_sampled(truncate(scaled, top_k, top_p), tokens)
    before = truncate(scaled, top_k, top_p)
    for row in range(40):
        order = scaled[row].sort(descending=True)
        size = top_k or 17
        mass = order.values[:size].softmax(-1)
        inside = {int(order.indices[i]) for i in range(size) if float(mass[:i].sum()) < top_p}
        assert bool(outside[row]) == (int(tokens[row]) not in inside)
        reached = kept_logits(
            torch.arange(17.0).expand(1, 1, 17), kept.map(lambda part, row=row: part[row : row + 1])
        )
        assert {int(i) for i in reached.flatten() if i >= 0} == inside | {int(tokens[row])}
    assert 0 < int(outside.sum()) < 40
    logprobs = token_logprobs(scaled.unsqueeze(1), tokens.unsqueeze(1), kept, 1.0).flatten()
    assert logprobs.isfinite().all()
    assert (logprobs <= 1e-6).all()
    unchanged = token_logprobs(scaled.unsqueeze(1), tokens.unsqueeze(1), before, 1.0).flatten()
    assert torch.equal(logprobs[~outside], unchanged[~outside])


def test_a_sequences_seed_follows_the_sequence_and_not_its_place():
    keys = sequence_keys([[1, 2], [3], [1, 2], [4, 5, 6]])
    seeds = sequence_seeds(keys, 0, 3)
    assert sequence_seeds(keys.flip(0), 0, 3) == seeds[::-1]
    assert (
        len({*seeds, *sequence_seeds(keys, 0, 4), *sequence_seeds(keys, 1, 3), *sequence_seeds(keys, 0, -1)})
        == 16
    )
    assert all(0 <= seed < 2**63 for seed in seeds)


# --- answers ---

JOB = RolloutJob([[1, 2]], [7], Sampling(4, 1.0, 0, 1.0, (0, 9), 0, 0), 20)


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [([5, 6, 9], [-1.0, -0.5, -2]), ([5, 6, 7, 8], [-1.0] * 4), ([0], [0.0]), ([5, 6, 7, 0], [-1.0] * 4)],
)
def test_an_answer_as_it_should_be(ids, logprobs):
    answer = parse_response(ids, logprobs, JOB)
    assert answer.ids == ids
    assert answer.ended(JOB.sampling.eos_ids) == (ids[-1] in (0, 9))


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        (None, [-1.0]),
        ("59", [-1.0, -1.0]),
        ([], []),
        ([5, 6], [-1.0, -1.0]),  # neither ended nor as long as allowed
        ([5] * 5, [-1.0] * 5),
        ([0, 5, 5, 5], [-1.0] * 4),  # on after EOS
        ([20, 9], [-1.0, -1.0]),
        ([-1, 9], [-1.0, -1.0]),
        ([5.0, 9], [-1.0, -1.0]),
        ([True, 9], [-1.0, -1.0]),
        ([5, 9], [-1.0]),
        ([5, 9], None),
        ([5, 9], [-1.0, 0.5]),
        ([5, 9], [-1.0, math.nan]),
        ([5, 9], [-1.0, -math.inf]),
        ([5, 9], [-1.0, "-1"]),
    ],
)
def test_an_answer_that_cannot_be_one_is_refused(ids, logprobs):
    with pytest.raises(InvalidResponse):
        parse_response(ids, logprobs, JOB)


def test_a_probe_tells_another_model_and_log_probabilities_of_another_kind():
    probe = WeightCheck([1, 2, 3], [-1.0, -2.0], 0.1)
    probe.check([-1.05, -2.05], 0.0)
    with pytest.raises(InvalidResponse, match="another model"):
        probe.check([-1.0, -2.5], 0.0)
    with pytest.raises(InvalidResponse, match="asked for"):
        probe.check([-1.0], 0.0)
    with pytest.raises(InvalidResponse, match="not finite"):
        probe.check([-1.0, math.nan], 0.0)
    for sampled in (-0.3, -math.log(2), 0.7):
        with pytest.raises(InvalidResponse, match="processed_logprobs"):
            probe.check([-1.0, -2.0], sampled)


def test_a_probe_takes_as_many_likeliest_tokens_as_rounding_could_make_equal():
    probe = WeightCheck([1, 2, 3], [-1.0, -2.0], 0.1, likeliest=3)
    for count in (1, 2, 3):
        probe.check([-1.0, -2.0], -math.log(count))
    for sampled in (-math.log(4), -0.9, -math.inf, math.nan):
        with pytest.raises(InvalidResponse, match="processed_logprobs"):
            probe.check([-1.0, -2.0], sampled)


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine_urls": "http://a:1"}, "engine_urls are for engine vllm"),
        ({"engine": "vllm", "engine_urls": "a:1"}, "'a:1' is not an address"),
        ({"engine": "vllm", "engine_urls": ["http://a:1", "ftp://b"]}, "'ftp://b' is not an address"),
        ({"engine": "vllm", "engine_urls": "http://me:secret@a:1"}, "leave them out"),
        ({"engine": "vllm", "engine_urls": "http://a:1", "lora_r": 0}, "set lora_r above 0"),
        ({"engine": "vllm", "overlap": True}, "overlap needs engine_urls"),
        ({"importance_clip": 0.5}, "importance_clip"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message) as problem:
        PPOConfig(**settings)
    assert "secret" not in str(problem.value)


def test_full_fine_tuning_of_tied_embeddings_is_refused_with_the_reason(make_config):
    with pytest.raises(ValueError, match="tied embeddings"):
        PPOTrainer(make_config(engine="vllm", lora_r=0))


def test_a_temperature_that_vllm_would_change_is_refused(serve, on_servers):
    with pytest.raises(ValueError, match="below what vLLM samples with"):
        PPOTrainer(on_servers(serve(), temperature=0.001))


def test_without_the_package_it_is_said_what_to_install(make_config):
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="pip install vllm, or give engine_urls"):
            PPOTrainer(make_config(engine="vllm"))


def test_ranks_that_vllm_has():
    assert [supported_rank(rank) for rank in (1, 4, 16, 17, 512)] == [1, 8, 16, 32, 512]
    with pytest.raises(ValueError, match="rank 513"):
        supported_rank(513)


# --- steps ---


def two_steps(config, prompts):
    trainer = shake(PPOTrainer(config))
    return trainer, [trainer.ppo_step(prompts) for _ in range(2)]


@pytest.mark.parametrize(
    "sampling", [{}, {"top_k": 0, "top_p": 1.0}, {"top_k": 0, "top_p": 0.8, "temperature": 0.7}]
)
def test_a_step_on_a_server_is_a_step(serve, on_servers, prompts, sampling):
    server = serve()
    outcomes = two_steps(on_servers(server, **sampling), prompts)[1]
    for outcome in outcomes:
        assert outcome["sampling_gap"] < LOGPROB_ROUNDING
        assert outcome["first_ratio_error"] < LOGPROB_ROUNDING
        assert (outcome["outside_kept"], outcome["policy_lag"], outcome["engine_retries"]) == (0, 0, 0)
        assert outcome["importance_truncated"] == 0
        tokens = outcome["sa_pairs"].tokens
        assert (tokens.kept is None) == (sampling.get("top_p") == 1.0)
        assert "importance" not in outcome["sa_pairs"].columns  # the difference is negligible
    names = [asked["model"] for asked in server.asked]
    assert len(set(names)) == 2  # a new name for the policy after each update
    assert outcomes[0]["grad_norm_policy"] > 0


def test_old_adapters_go_and_nothing_is_left_after_a_run(serve, on_servers, prompts):
    server = serve()
    trainer = PPOTrainer(on_servers(server, batch_size=1))
    trainer.train(prompts)
    assert len(server.paths) >= 4
    assert server.loaded == {}
    assert not any(Path(path).exists() for path in server.paths.values())


def test_what_is_sampled_does_not_depend_on_who_answers(serve, on_servers, prompts):
    one, (first, _) = two_steps(on_servers(serve()), prompts)
    three, (again, _) = two_steps(on_servers(serve(), serve(), serve()), list(reversed(prompts)))
    assert first["generated_texts"] == again["generated_texts"][::-1]
    assert difference(weights(one), weights(three)) < rounding(one)


def hang_up_from(count):
    """Dies in the middle: no more answers after the first so many samples."""
    seen = []

    def fault(server, path, asked, answer):
        if is_sampling(path, asked):
            seen.append(path)
        return None if len(seen) > count else answer

    return fault


def choice(**changes):
    def fault(server, path, asked, answer):
        if not is_sampling(path, asked):
            return answer
        return {**answer, "choices": [{**answer["choices"][0], **changes}]}

    return fault


def instead(wrong):
    return lambda server, path, asked, answer: wrong if is_sampling(path, asked) else answer


FAULTS = {
    "dies": hang_up_from(2),
    "is dead": lambda *given: None,
    "stalls": stalls(6),
    "fails": instead((500, "Traceback")),
    "bad JSON": instead('{"choices": [{'),
    "deep JSON": instead("[" * 100_000),
    "no object": instead("[]"),
    "no choice": instead({"model": "x", "choices": []}),
    "two choices": lambda s, path, asked, answer: (
        {**answer, "choices": answer["choices"] * 2} if "choices" in answer else answer
    ),
    "other model": lambda s, path, asked, answer: (
        {**answer, "model": "base"} if is_sampling(path, asked) else answer
    ),
    "ids out of the vocabulary": choice(token_ids=[999_999] * 6),
    "too many tokens": choice(token_ids=[1] * 9),
    "too few tokens": choice(token_ids=[1]),
    "no ids": choice(token_ids=None),
    "no log-probabilities": choice(logprobs=None),
    "log-probabilities above 0": choice(token_ids=[1] * 6, logprobs={"token_logprobs": [5.0] * 6}),
    "raw log-probabilities": "raw",
}


@pytest.fixture(scope="module")
def undisturbed():
    return {}


PARSED = ("ids out of the vocabulary", "too many tokens", "too few tokens", "no ids", "no log-probabilities")
"""Refused by `parse_response`, as above: in a whole step they are what `no choice` is."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in PARSED)) for name in FAULTS]
)
def test_another_server_completes_the_step(serve, on_servers, prompts, undisturbed, name):
    if not undisturbed:
        undisturbed["weights"] = weights(two_steps(on_servers(serve()), prompts)[0])
    bad = serve(processed=False) if FAULTS[name] == "raw" else serve(FAULTS[name])
    patience = 4.0 if name == "stalls" else 60.0  # the good server must answer within it, on busy cores too
    trainer, outcomes = two_steps(on_servers(bad, serve(), engine_timeout=patience), prompts)
    assert difference(weights(trainer), undisturbed["weights"]) < rounding(trainer)
    if name not in (
        "is dead",
        "two choices",
        "raw log-probabilities",
    ):  # these are found out before a response is asked for
        assert sum(outcome["engine_retries"] for outcome in outcomes) > 0


def test_a_server_of_another_model_is_not_sampled_from(serve, on_servers, prompts, tmp_path):
    other = serve(model=str(make_tiny_model(tmp_path / "other", seed=1)))
    good = serve()
    two_steps(on_servers(other, good), prompts)
    assert not [asked for asked in other.asked if "prompt_logprobs" not in asked]
    with pytest.raises(EngineFailure, match="another model or other weights"):
        PPOTrainer(on_servers(other)).ppo_step(prompts)


def test_a_server_that_came_back_gets_the_adapter_again(serve, on_servers, prompts):
    calm, shaken = serve(), serve()
    expected = weights(two_steps(on_servers(calm), prompts)[0])
    seen = []

    def forgetful(server, path, asked, answer):
        if "prompt_logprobs" in asked and not seen:  # just after the adapter was proven
            seen.append(asked)
            server.restart()
        return answer

    shaken.fault = forgetful
    trainer, outcomes = two_steps(on_servers(shaken), prompts)
    assert difference(weights(trainer), expected) < rounding(trainer)
    assert outcomes[0]["engine_retries"] > 0


def test_a_server_that_is_late_is_waited_for(serve, on_servers, prompts):
    import threading

    server = serve(lambda *given: None)
    threading.Timer(0.5, lambda: setattr(server, "fault", None)).start()
    assert PPOTrainer(on_servers(server, engine_timeout=20.0)).ppo_step(prompts)["tokens"] > 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda *given: None, "cannot be reached"),
        (choice(token_ids=None), "sent an invalid reply: no list of token ids"),
        (lambda s, path, asked, answer: (404, {"detail": "Not Found"}), "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        (
            lambda s, path, *rest: (
                (400, {"error": {"message": "rank 16 > 8"}}) if "load" in path else rest[-1]
            ),
            "rank 16 > 8",
        ),
    ],
)
def test_when_no_server_is_left_the_run_stops_and_can_go_on(serve, on_servers, prompts, fault, message):
    server = serve()
    config = on_servers(server, batch_size=2, run_name="r", engine_timeout=1.0, checkpoint_every=0)
    seen = set()

    def later(server, path, asked, answer):
        seen.add(asked.get("model") or asked.get("lora_name"))
        return answer if len(seen) < 2 else fault(server, path, asked, answer)

    server.fault = later
    with pytest.raises(EngineFailure, match=message) as problem:
        PPOTrainer(config).train(prompts)
    assert "weights as they were before this step" in str(problem.value)
    server.fault = None
    resumed = PPOTrainer(config).train(prompts, resume=True)
    assert [metrics["step"] for metrics in resumed.metrics] == [1, 2]
    expected = PPOTrainer(replace(config, run_name="calm"))
    calm = expected.train(prompts)
    assert calm.metrics[1]["avg_reward"] == pytest.approx(resumed.metrics[1]["avg_reward"], rel=1e-5)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("masks", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_processes_share_the_servers(serve, on_servers, forked, tmp_path, masks):
    """Each asks for its own rows; the numbers are those of one process."""
    server, prompts = serve(masks=masks), [f"Post {i}: TL;DR:" for i in range(6)]
    settings = {
        "batch_size": 3,
        "minibatch_size": 3,
        "run_name": "one",
        "rewards": "tests.processes_runs:count_e",
    }
    one = PPOTrainer(on_servers(server, **settings)).train(prompts).metrics
    config = on_servers(
        server, **{**settings, "run_name": "two", "run_dir": str(tmp_path / "two"), "overlap": False}
    )
    config.to_yaml(tmp_path / "two.yaml")
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    words = [
        "-m",
        "proxima",
        "train",
        "--config",
        str(tmp_path / "two.yaml"),
        "--data",
        str(tmp_path / "prompts.txt"),
    ]
    done = forked(torchrun(2, *words, "--skip-checks"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    two = [json.loads(line) for line in (tmp_path / "two" / "two" / "metrics.jsonl").read_text().splitlines()]
    for left, right in zip(one, two, strict=True):
        for name in ("avg_reward", "kl", "policy_loss", "value_loss", "tokens", "outside_kept", "policy_lag"):
            assert right[name] == pytest.approx(left[name], abs=1e-4, rel=1e-4), name
        assert right["sampling_gap"] < 1e-4
    assert server.loaded == {}


# --- importance weights in a run ---


def lying_by(amount):
    """Another engine's arithmetic: every log-probability is off by a little."""

    def fault(server, path, asked, answer):
        if not is_sampling(path, asked):
            return answer
        found = answer["choices"][0]
        changed = [min(number - amount, 0.0) for number in found["logprobs"]["token_logprobs"]]
        return {**answer, "choices": [{**found, "logprobs": {"token_logprobs": changed}}]}

    return fault


def test_a_difference_that_is_not_negligible_is_corrected(serve, on_servers, prompts):
    settings = {"top_k": 0, "top_p": 1.0, "importance_clip": 1.5}
    small = shake(PPOTrainer(on_servers(serve(lying_by(0.1)), **settings))).ppo_step(prompts)
    assert small["sampling_gap"] == pytest.approx(0.1, rel=1e-2)
    assert small["importance_truncated"] == 0
    mask, column = small["sa_pairs"].mask, small["sa_pairs"].column("importance")
    assert column[mask].mean() == pytest.approx(math.exp(0.1), rel=1e-3)
    large = shake(PPOTrainer(on_servers(serve(lying_by(2.0)), **settings))).ppo_step(prompts)
    assert large["importance_truncated"] == 1
    assert float(large["sa_pairs"].column("importance")[mask].max()) == pytest.approx(1.5)
    assert large["first_ratio_error"] < LOGPROB_ROUNDING  # the training side decides the ratio


def test_masks_reject_what_lies_outside_the_band(serve, on_servers, prompts):
    """Every weight is exp(0.1) = 1.105: kept by a mask that reaches so far, rejected by a narrower one."""
    settings = {"top_k": 0, "top_p": 1.0, "importance_clip": 1.05}
    server = serve(lying_by(0.1))

    def step(**more):
        return shake(PPOTrainer(on_servers(server, **{**settings, **more}))).ppo_step(prompts)

    for mode in ("mask", "sequence_mask"):
        rejected = step(importance_mode=mode)
        assert rejected["importance_truncated"] == 1
        assert not rejected["sa_pairs"].column("importance")[rejected["sa_pairs"].mask].any()
        assert (rejected["policy_loss"], rejected["grad_norm_policy"]) == (0, 0)
        kept = step(importance_mode=mode, importance_clip=2.0)
        expected = math.exp(0.1) if mode == "mask" else 1.0
        assert kept["importance_truncated"] == 0
        assert kept["sa_pairs"].column("importance")[kept["sa_pairs"].mask].mean() == pytest.approx(
            expected, rel=1e-3
        )
        assert kept["grad_norm_policy"] > 0
    server = serve(lying_by(-0.3))  # weights of exp(-0.3) = 0.74
    assert step(importance_mode="sequence_mask")["importance_truncated"] < 1
    assert step(importance_mode="sequence_mask", importance_low=0.9)["importance_truncated"] > 0
    found = step(objective="dis", importance_clip=2.0)
    assert "importance" not in found["sa_pairs"].columns  # its ratio has them already


def test_several_responses_per_prompt(serve, on_servers, prompts):
    chosen = {"adv_estimator": "rloo", "num_generations": 3, "whiten_advantages": False}
    trainer = PPOTrainer(on_servers(serve(), top_k=0, top_p=1.0, value_learning_rate=1e-4, **chosen))
    outcome = trainer.ppo_step(prompts)
    texts, rows = outcome["generated_texts"], outcome["sa_pairs"].tokens.prompts
    assert rows == [prompt for prompt in prompts for _ in range(3)]
    assert all(len(set(texts[i : i + 3])) > 1 for i in range(0, len(texts), 3))


@pytest.mark.long
def test_units_doubt_and_a_kl_budget_resume_bit_exactly_with_servers(serve, on_servers, judge, ensemble):
    """A classifier whose unit is measured on the server's samples of the reference, and an ensemble."""
    prompts = [f"prompt {i}" for i in range(6)]
    chosen = {
        "rewards": (RewardSpec(judge, 0.5), RewardSpec(ensemble, options={"doubt_coef": 2.0})),
        "batch_size": 2, "kl_controller": "budget", "kl_target": 0.05, "checkpoint_every": 1,
    }  # fmt: skip
    server, found = serve(), []
    whole = PPOTrainer(on_servers(server, **chosen, run_name="whole"))
    found.append(whole.train(prompts))
    config = on_servers(server, **chosen, run_name="cut")
    with pytest.raises(Crash):
        crash_at(PPOTrainer(config), 2).train(prompts)
    resumed = PPOTrainer(config)
    found.append(resumed.train(prompts, resume=True))
    left, right = (
        [{name: str(value) for name, value in step.items() if "seconds" not in name} for step in each.metrics]
        for each in found
    )
    assert left == right
    assert difference(weights(whole), weights(resumed)) == 0
    assert whole.reward_computer.units == resumed.reward_computer.units
    [unit] = whole.reward_computer.units.values()
    assert unit.deviation > 0
    steps = found[0].metrics
    assert len({step["kl_coef"] for step in steps}) > 1
    assert all(step["reward_spread"] > 0 for step in steps)
    assert all(abs(step["reward/judge"]) < 4 for step in steps)  # in its unit


def test_tokens_outside_the_kept_set_are_counted_and_harmless(serve, on_servers, prompts):
    """An engine that keeps more than it should."""
    server = serve()
    plain = server._complete
    server._complete = lambda asked: plain({**asked, "top_k": 0} if "prompt_logprobs" not in asked else asked)
    outcome = shake(PPOTrainer(on_servers(server, top_k=3, top_p=1.0))).ppo_step(prompts)
    assert 0 < outcome["outside_kept"] < outcome["tokens"]
    assert all(
        math.isfinite(outcome[name])
        for name in ("kl", "policy_loss", "sampling_gap", "entropy", "grad_norm_policy")
    )
    assert outcome["skipped_updates"] == 0
    assert outcome["first_ratio_error"] < LOGPROB_ROUNDING


# --- overlap ---


def adapters_of_steps(server, prompts, batch):
    names = [asked["model"] for asked in server.asked if "prompt_logprobs" not in asked]
    return [set(names[i : i + batch]) for i in range(0, len(names), batch)]


def test_overlap_samples_one_update_behind_and_says_so(serve, on_servers, prompts, caplog):
    server = serve()
    config = on_servers(server, batch_size=2, overlap=True)
    with caplog.at_level("INFO"):
        results = PPOTrainer(config).train(prompts * 2)
    assert "one update behind" in caplog.text
    assert [metrics["policy_lag"] for metrics in results.metrics] == [0, 1, 1, 1]
    assert results.metrics[0]["sampling_gap"] < LOGPROB_ROUNDING < results.metrics[1]["sampling_gap"]
    used = adapters_of_steps(server, prompts, 2)
    assert used[0] == used[1]  # the second step's responses come from the policy of the first
    assert len(used[0] | used[2] | used[3]) == 3
    assert server.loaded == {}


def test_the_weights_of_an_overlapped_step_are_new_over_old(serve, on_servers, prompts):
    trainer = shake(
        PPOTrainer(
            on_servers(serve(), overlap=True, top_k=0, top_p=1.0, learning_rate=1e-2, importance_clip=50.0)
        )
    )
    trainer.ppo_step(prompts, prompts)
    before = trainer.generator._prefetch.pending.responses.result()
    pairs = trainer.ppo_step(prompts)["sa_pairs"]
    for row, answer in enumerate(before):
        now = pairs.column("logprob_policy")[row].tolist()
        assert pairs.tokens.response_ids[row][pairs.mask[row]].tolist() == answer.ids
        for position, old in enumerate(answer.logprobs):
            weight = float(pairs.column("importance")[row, position])
            assert weight == pytest.approx(min(math.exp(now[position] - old), 50.0), rel=1e-3)
    assert (pairs.column("importance")[pairs.mask] - 1).abs().max() > 1e-3


def test_a_rollout_in_flight_is_thrown_away_when_weights_are_loaded(serve, on_servers, prompts, tmp_path):
    server = serve()
    trainer = shake(PPOTrainer(on_servers(server, overlap=True)))
    trainer.save(tmp_path / "before")
    trainer.ppo_step(prompts, prompts)
    trainer.generator._prefetch.pending.responses.result()
    trainer.load(tmp_path / "before")
    assert trainer.ppo_step(prompts)["policy_lag"] == 0
    assert len([asked for asked in server.asked if "prompt_logprobs" not in asked]) == 3 * len(
        prompts
    )  # sampled again


def test_an_overlapped_run_continues_after_a_failure(serve, on_servers, prompts):
    server = serve()
    config = on_servers(
        server, batch_size=1, run_name="r", overlap=True, engine_timeout=1.0, checkpoint_every=1
    )
    names = set()

    def fault(server, path, asked, answer):
        names.add(asked.get("model"))
        return None if len(names - {None}) >= 3 else answer

    server.fault = fault
    with pytest.raises(EngineFailure):
        PPOTrainer(config).train(prompts)
    server.fault = None
    results = PPOTrainer(config).train(prompts, resume=True)
    assert [metrics["step"] for metrics in results.metrics] == [1, 2, 3, 4]
    lags = [metrics["policy_lag"] for metrics in results.metrics]
    assert lags[0] == 0
    assert lags.count(0) == 2  # the first step, and the first after the failure: sampled again
