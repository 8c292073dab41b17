"""What a vLLM engine can do is probed: its sampling masks are used where it returns them, and what it lacks
is refused in one line. vLLM itself: tests/engines."""

import random

import pytest
import torch

from proxima.core.errors import EngineFailure
from proxima.core.sampling import Sampling
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.vllm import in_process_engine
from proxima.runtime.vllm.rollout_job import InvalidResponse, RolloutJob, parse_response
from proxima.runtime.vllm.vllm_rollouts import kept_sets
from proxima.runtime.vllm.vllm_server import WITH_MASKS
from tests.helpers import LOGPROB_ROUNDING, shake
from tests.rollout_server import RolloutServer, is_sampling
from tests.vllm_stub import install

JOB = RolloutJob([[1, 2]], [7], Sampling(4, 1.0, 3, 1.0, (0, 9), 0, 0), 20)
TOP_K = {"top_k": 4, "top_p": 1.0, "temperature": 0.8}


@pytest.fixture
def serve(tiny):
    started = []

    def start(**settings):
        started.append(RolloutServer(tiny, **settings))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def step_on(make_config, prompts):
    """One PPO step; on servers where some are given, else on the vLLM in this process."""

    def step(*servers, **settings):
        urls = tuple(server.url for server in servers)
        trainer = shake(PPOTrainer(make_config(engine="vllm", engine_urls=urls, **{**TOP_K, **settings})))
        return trainer.ppo_step(prompts)

    return step


def check_log_probabilities(outcome, model):
    """Against the formula in plain numbers: the logits of transformers and PEFT, over the ids that the engine
    says it sampled from."""
    pairs = outcome["sa_pairs"]
    tokens = pairs.tokens
    assert outcome["outside_kept"] == 0
    for row in range(len(tokens.prompts)):
        prompt = tokens.prompt_ids[row][tokens.prompt_mask[row]]
        response = tokens.response_ids[row][tokens.mask[row]]
        with torch.no_grad():
            logits = model.model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        scaled = logits.double() / TOP_K["temperature"]
        masks = model.masks_of[tuple(response.tolist())]
        for place, (token, mask) in enumerate(zip(response.tolist(), masks, strict=True)):
            expected = float(scaled[place, token] - scaled[place, mask].logsumexp(-1))
            assert float(pairs.column("logprob_policy")[row, place]) == pytest.approx(
                expected, abs=LOGPROB_ROUNDING
            )
            listed = tokens.kept.ids[row, place]
            assert set(listed[listed >= 0].tolist()) == set(mask)
    assert outcome["sampling_gap"] < LOGPROB_ROUNDING
    assert outcome["first_ratio_error"] < LOGPROB_ROUNDING


def test_a_servers_sampling_masks_are_its_kept_sets(serve, step_on):
    server = serve(masks=True, other_sets=True)
    check_log_probabilities(step_on(server), server)
    assert {asked["sampling_params"]["top_k"] for asked in server.asked if "sampling_params" in asked} == {
        1,
        4,
    }
    recomputed = step_on(serve(other_sets=True))
    assert recomputed["outside_kept"] > 0  # what the masks are for
    assert recomputed["sampling_gap"] > 1e-3


def test_tokens_that_tie_neither_fail_the_probes_nor_hide_the_masks(serve, step_on):
    """In coarse arithmetic several tokens are the likeliest, or the last one kept."""
    server = serve(masks=True, coarse=True)
    outcome = step_on(server)
    sizes = (outcome["sa_pairs"].tokens.kept.ids >= 0).sum(-1)
    assert int(sizes.max()) > TOP_K["top_k"]
    assert outcome["outside_kept"] == 0
    probed = [masks for token, masks in server.masks_of.items() if len(token) == 1]
    assert any(len(mask) > 1 for (mask,) in probed)


def test_masks_that_do_not_fit_the_log_probability_are_not_used(serve, step_on):
    def one_more(server, path, asked, answer):
        if path == WITH_MASKS:
            choice = answer["choices"][0]
            choice["sampling_mask"] = [[*{*mask, 3, 4}] for mask in choice["sampling_mask"]]
        return answer

    outcome = step_on(serve(masks=True, fault=one_more))
    assert "outside_kept" in outcome["sa_pairs"].columns  # recomputed


def test_the_engine_in_this_process_is_asked_for_masks(step_on, monkeypatch):
    engines = install(monkeypatch, other_sets=True)
    outcome = step_on()
    check_log_probabilities(outcome, engines[0].behind)
    assert engines[0].given["return_sampling_mask"] is True
    assert "use_tqdm_on_load" not in engines[0].given  # this release does not know it
    step_on(top_k=0)
    assert "return_sampling_mask" not in engines[1].given  # it needs a top_k


@pytest.mark.parametrize("settings", [{"without": ["return_sampling_mask"]}, {"refuses_masks": True}])
def test_an_engine_that_returns_no_masks_is_used_without(step_on, monkeypatch, settings):
    engines = install(monkeypatch, **settings)
    outcome = step_on()
    assert "return_sampling_mask" not in engines[-1].given
    assert outcome["sampling_gap"] < LOGPROB_ROUNDING
    assert outcome["sa_pairs"].tokens.kept is not None


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("logprobs_mode", r"log-probabilities of the distribution that it samples from \(`logprobs_mode`\)"),
        ("enable_lora", r"adapters \(`enable_lora`\)"),
        ("prompt_logprobs", r"log-probabilities of a prompt \(`prompt_logprobs`\)"),
        ("LoRARequest", "adapters by name"),
    ],
)
def test_what_the_installed_engine_lacks_is_refused_in_one_line(step_on, monkeypatch, lacking, message):
    engines = install(monkeypatch, without=[lacking])
    with pytest.raises(ValueError, match=message) as problem:
        step_on()
    assert "vLLM 0.0.7" in str(problem.value)
    assert "\n" not in str(problem.value)
    assert not engines


def test_replies_in_another_form_are_one_line(step_on, monkeypatch):
    install(monkeypatch, without=["logprob objects"])
    with pytest.raises(EngineFailure, match="in a form that is not known here") as problem:
        step_on()
    assert "\n" not in str(problem.value)


def test_an_engine_that_cannot_remove_adapters_is_used_and_one_that_cannot_stop_is_left(
    step_on, make_config, prompts, monkeypatch
):
    monkeypatch.setattr(in_process_engine, "_running", [])
    install(monkeypatch, without=["remove_lora", "engine_core"])
    trainer = PPOTrainer(make_config(engine="vllm", **TOP_K))
    for _ in range(3):  # a new adapter each
        assert trainer.ppo_step(prompts)["sampling_gap"] < LOGPROB_ROUNDING
    with pytest.raises(ValueError, match="cannot stop the engine that an earlier trainer started"):
        step_on()


@pytest.mark.parametrize("lacking", ["token_ids", "logprobs", "prompt_logprobs"])
def test_what_a_server_lacks_is_refused_in_one_line(serve, step_on, lacking):
    def fault(server, path, asked, answer):
        if "choices" in answer:
            del answer["choices"][0][lacking]
        return answer

    with pytest.raises(EngineFailure, match=rf"vLLM 0.0.7 there does not return .*`.*{lacking}`") as problem:
        step_on(serve(fault=fault))
    assert "\n" not in str(problem.value)


def test_servers_with_and_without_masks_together_recompute_them(serve, step_on):
    outcome = step_on(serve(masks=True), serve())
    assert outcome["sampling_gap"] < LOGPROB_ROUNDING
    assert "outside_kept" in outcome["sa_pairs"].columns


def test_a_server_that_comes_back_without_masks_is_used_without(serve, step_on):
    server = serve(masks=True)

    def restarts(server, path, asked, answer):
        if is_sampling(path, asked):
            server.fault, server.masks = None, False
            server.restart()
            return server.answer(path, asked)
        return answer

    server.fault = restarts
    outcome = step_on(server)
    assert outcome["engine_retries"] > 0
    assert outcome["sampling_gap"] < LOGPROB_ROUNDING
    assert "outside_kept" in outcome["sa_pairs"].columns


@pytest.mark.parametrize(
    "masks",
    [
        7,
        [[5, 1]],
        [[5], [9], [9]],
        [[5], 9],
        [[5], [1]],  # without the token
        [[5, 5], [9]],
        [[5, 20], [9]],
        [[5, -1], [9]],
        [[True, 5], [9]],
        [["5"], [9]],
        [[], [9]],
        [list(range(13)), [9]],  # far more than top_k 3
    ],
)
def test_masks_that_cannot_be_are_refused(masks):
    with pytest.raises(InvalidResponse, match="mask"):
        parse_response([5, 9], [-1.0, -1.0], JOB, masks)


def test_masks_become_kept_sets_of_one_shape():
    assert parse_response([5, 9], [-1.0, -1.0], JOB, [[5, 1], [9]]).kept == [[5, 1], [9]]
    random_masks = [
        [random.Random(row).sample(range(20), size) for size in sizes]
        for row, sizes in enumerate(([3, 1], [2, 4, 1]))
    ]
    found = kept_sets(random_masks, 3, torch.device("cpu")).ids
    assert found.shape == (2, 3, 4)
    for row, masks in enumerate(random_masks):
        for place in range(3):
            expected = masks[place] if place < len(masks) else []
            assert found[row, place].tolist() == expected + [-1] * (4 - len(expected))
    assert kept_sets([[[1]], None], 1, torch.device("cpu")) is None
    assert kept_sets([], 0, torch.device("cpu")) is None
