"""Rollouts on real vLLM, in this process and on its servers: `make test-engines`. Float32 on a CPU."""

import math
import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm")

from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen3Config

from proxima.base_setup.loading import EMBEDDED
from proxima.config import PPOConfig, RewardConfig, RewardSpec
from proxima.core.errors import EngineFailure
from proxima.finetuning import Preference, RewardTrainer
from proxima.models import saved_units
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.vllm import vllm_rollouts
from proxima.runtime.vllm.engine_abilities import known_arguments
from proxima.runtime.vllm.vllm_server import WITH_MASKS
from proxima.world.posts import make_posts
from proxima.world.tiny_models import byte_tokenizer
from tests.helpers import difference, shake, weights
from tests.rollout_server import RolloutServer, is_sampling

pytestmark = pytest.mark.timeout(1800)  # servers start within it, on busy cores too
PROMPTS = [post.prompt for post in make_posts(12, "train", 1)]
WAYS = {"all": (0, 1.0, 1.0), "top-k and top-p": (20, 0.9, 1.0), "top-p, cooler": (0, 0.8, 0.7)}


def in_words(prompts, texts):
    return [len(text.split()) / 10 for text in texts]


def make(tmp_path, urls=(), **settings):
    given = {
        "engine": "vllm",
        "max_new_tokens": 16,
        "batch_size": 4,
        "minibatch_size": 4,
        "rewards": (in_words,),
    }
    given |= {
        "learning_rate": 2e-3,
        "value_learning_rate": 2e-3,
        "dtype": "float32",
        "run_dir": str(tmp_path / "runs"),
    }
    return PPOConfig("embedded", engine_urls=tuple(urls), **{**given, **settings})


@pytest.fixture(params=["in this process", "over HTTP"])
def urls(request):
    return (
        ()
        if request.param == "in this process"
        else [server.url for server in request.getfixturevalue("servers")]
    )


def logprobs_by_peft(folder, tokens, row, temperature):
    """What transformers and PEFT alone say of a response, over the whole vocabulary."""
    network = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    network = PeftModel.from_pretrained(network, folder).eval()
    prompt = tokens.prompt_ids[row][tokens.prompt_mask[row]]
    response = tokens.response_ids[row][tokens.mask[row]]
    with torch.no_grad():
        logits = network(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, response[:, None]).squeeze(-1)


def test_the_adapter_is_swapped_by_the_log_probabilities_before_and_after_an_update(urls, tmp_path):
    trainer = shake(PPOTrainer(make(tmp_path, urls, top_k=0, top_p=1.0, temperature=0.9)), 0.02)
    folders, found = [], []
    for _ in range(2):
        tokens = trainer.generator.sample(PROMPTS)
        folders.append(trainer.generator.rollouts.versions.kept[-1].folder)
        found.append(tokens)
        for row in (0, 5):
            expected = logprobs_by_peft(folders[-1], tokens, row, 0.9)
            assert (tokens.sampled_logprobs[row][tokens.mask[row]] - expected).abs().max() < 1e-4
        if len(folders) == 1:
            trainer.ppo_step(PROMPTS)
    assert folders[0] != folders[1]
    moved = logprobs_by_peft(folders[1], found[0], 0, 0.9) - found[0].sampled_logprobs[0][found[0].mask[0]]
    assert moved.abs().max() > 1e-2  # the update is large enough to see a stale adapter


@pytest.mark.parametrize("way", WAYS)
def test_every_token_has_the_training_sides_log_probability(urls, tmp_path, way):
    top_k, top_p, temperature = WAYS[way]
    trainer = shake(PPOTrainer(make(tmp_path, urls, top_k=top_k, top_p=top_p, temperature=temperature)), 0.02)
    for _ in range(2):
        outcome = trainer.ppo_step(PROMPTS)
        pairs = outcome["sa_pairs"]
        gap = (pairs.tokens.sampled_logprobs - pairs.column("logprob_policy"))[pairs.mask].abs()
        assert (
            gap.quantile(0.95) < 1e-4
        )  # where rounding moves a token over the kept set's edge, it may be more
        assert outcome["sampling_gap"] < 1e-3
        assert outcome["outside_kept"] <= 1
        assert outcome["first_ratio_error"] < 1e-4
        assert outcome["policy_lag"] == 0


def test_several_responses_per_prompt_differ_and_are_compared_without_a_value_model(urls, tmp_path):
    chosen = {"adv_estimator": "grpo", "num_generations": 3, "whiten_advantages": False}
    trainer = PPOTrainer(make(tmp_path, urls, top_k=0, top_p=1.0, **{**chosen, "value_learning_rate": 1e-4}))
    for _ in range(2):
        outcome = trainer.ppo_step(PROMPTS[:4])
        assert outcome["sa_pairs"].tokens.prompts == [prompt for prompt in PROMPTS[:4] for _ in range(3)]
        texts = outcome["generated_texts"]
        assert any(len(set(texts[i : i + 3])) == 3 for i in range(0, 12, 3))
        assert outcome["sampling_gap"] < 1e-3
        assert outcome["first_ratio_error"] < 1e-4
    assert trainer.models.value is None


def test_responses_end_as_those_of_the_built_in_engine(urls, tmp_path):
    trainer = PPOTrainer(make(tmp_path, urls, max_new_tokens=24))
    tokens = trainer.generator.sample(PROMPTS)
    ends = set(trainer.models.eos_ids)
    assert tokens.ended.any()
    for row in range(len(PROMPTS)):
        ids = tokens.response_ids[row][tokens.mask[row]].tolist()
        assert not ends & set(ids[:-1])
        assert bool(tokens.ended[row]) == (ids[-1] in ends)
        assert bool(tokens.ended[row]) or len(ids) == 24
    other = int(tokens.response_ids[0, 1])  # another end, as models with several have
    trainer.models.eos_ids = (*trainer.models.eos_ids, other)
    again = trainer.generator.sample(PROMPTS)
    assert again.mask[0].sum() == 2
    assert again.ended[0]
    assert int(again.response_ids[0, 1]) == other


def test_it_samples_from_the_distribution_it_names(urls, tmp_path):
    """The first token of many copies of a prompt against the training side's probabilities: a chi-square
    of 4 deviations."""
    trainer = shake(
        PPOTrainer(make(tmp_path, urls, max_new_tokens=1, top_k=8, top_p=1.0, temperature=1.5)), 0.02
    )
    count = 400
    tokens = trainer.generator.sample([PROMPTS[0]] * count)
    logits = trainer.models.policy.response_logits(tokens.select(torch.tensor([0])))[0, 0] / 1.5
    best = logits.topk(8)
    expected = best.values.softmax(-1) * count
    seen = torch.stack([(tokens.response_ids[:, 0] == token).sum() for token in best.indices]).float()
    assert seen.sum() == count
    chi = float(((seen - expected) ** 2 / expected).sum())
    assert chi < 7 + 4 * math.sqrt(14)


def test_what_this_release_lacks_is_found_by_asking_it(tmp_path, caplog):
    """It knows sampling masks and refuses them on a CPU; the engine is started without, and says why."""
    with caplog.at_level("INFO"):
        trainer = PPOTrainer(make(tmp_path, top_k=20))
    assert "return_sampling_mask" in known_arguments(adapters=True)
    assert "returns no sampling masks here" in caplog.text
    assert trainer.ppo_step(PROMPTS)["sampling_gap"] < 1e-3


def test_the_endpoint_of_sampling_masks_answers_in_the_form_that_is_read(servers, tmp_path):
    """On a CPU without masks, so the probe says no; token ids and log-probabilities come in the same form."""
    trainer = PPOTrainer(make(tmp_path, [servers[0].url], top_k=20))
    trainer.generator.sample(PROMPTS)
    (server,) = trainer.generator.rollouts.engine.servers
    assert server._returns_masks is False
    server._returns_masks = True
    asked = []
    send = server._send

    async def listening(client, method, path, *rest):
        asked.append(path)
        return await send(client, method, path, *rest)

    server._send = listening
    assert trainer.ppo_step(PROMPTS)["sampling_gap"] < 1e-3
    assert asked.count(WITH_MASKS) == len(PROMPTS)


def test_the_memory_it_may_take_changes_nothing_else(tmp_path):
    texts = []
    for memory in (0.3, 0.2):
        trainer = PPOTrainer(make(tmp_path, engine_memory=memory))
        assert (
            trainer.generator.rollouts.engine._llm.llm_engine.vllm_config.cache_config.gpu_memory_utilization
            == memory
        )
        texts.append(trainer.generator.sample(PROMPTS).texts())
    assert texts[0] == texts[1]


def test_an_ensemble_in_its_unit_under_a_kl_budget(urls, tmp_path):
    """Both read what vLLM sampled: the heads that disagree, and the exact KL that sets the coefficient."""
    pairs = [
        Preference(prompt, " i feel sad.", " anyway" + "!" * (at % 3)) for at, prompt in enumerate(PROMPTS)
    ]
    config = RewardConfig("embedded", ensemble=3, epochs=1, batch_size=4, run_dir=str(tmp_path))
    folder = str(RewardTrainer(config).train(pairs).folder)
    assert len(saved_units(folder)) == 3
    rewards = (RewardSpec(folder, options={"doubt_coef": 2.0}),)
    trainer = PPOTrainer(make(tmp_path, urls, rewards=rewards, kl_controller="budget", kl_target=0.05))
    tokens = trainer.generator.sample(PROMPTS)
    scored = trainer.reward_computer.score_tokens(tokens)
    members = trainer.models.reward.token_members(tokens).double()
    expected = members.mean(1) - 2 * members.std(1, correction=0)
    assert torch.allclose(scored.total, expected, atol=1e-4)
    steps = trainer.train(PROMPTS).metrics
    assert steps[-1]["kl_coef"] > steps[0]["kl_coef"]  # the KL is far above the target
    for step in steps:
        assert step["reward_spread"] > 0
        assert abs(step["avg_reward"] + 2 * step["reward_spread"]) < 3  # the mean of the heads, in its unit
        assert step["sampling_gap"] < 1e-3


def test_a_server_samples_what_this_process_would(servers, tmp_path):
    alone, apart = (shake(PPOTrainer(make(tmp_path, urls)), 0.02) for urls in ((), [servers[0].url]))
    together = shake(PPOTrainer(make(tmp_path, [server.url for server in servers])), 0.02)
    texts = [
        [trainer.ppo_step(PROMPTS)["generated_texts"] for _ in range(2)]
        for trainer in (alone, apart, together)
    ]
    same = [
        a == b
        for one in texts[1:]
        for x, y in zip(texts[0], one, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    assert sum(same) >= 0.9 * len(same)  # one seed per sequence; rounding alone may turn a token
    assert difference(weights(apart), weights(together)) < 1e-2


def test_a_server_that_lies_costs_nothing_but_time(servers, tmp_path):
    def fault(server, path, asked, answer):
        return '{"choices": 7}' if is_sampling(path, asked) else answer

    liar = RolloutServer(str(EMBEDDED), fault)
    expected = shake(PPOTrainer(make(tmp_path, [servers[0].url])), 0.02).ppo_step(PROMPTS)
    found = shake(PPOTrainer(make(tmp_path, [liar.url, servers[0].url])), 0.02).ppo_step(PROMPTS)
    liar.close()
    assert found["engine_retries"] > 0
    assert found["generated_texts"] == expected["generated_texts"]


def test_overlap_on_a_server(servers, tmp_path):
    config = make(tmp_path, [servers[0].url], overlap=True, learning_rate=1e-2)
    results = PPOTrainer(config).train(PROMPTS)
    assert [metrics["policy_lag"] for metrics in results.metrics] == [0, 1, 1]
    assert results.metrics[0]["sampling_gap"] < 1e-3 < results.metrics[2]["sampling_gap"]
    assert all(metrics["skipped_updates"] == 0 for metrics in results.metrics)


def test_a_killed_server_is_done_without_and_the_last_one_stops_the_run(servers, tmp_path):
    """One is killed while it samples: the other completes the step. Then both are gone, and come back."""
    config = make(
        tmp_path, [server.url for server in servers], max_new_tokens=24, run_name="r", engine_timeout=15.0
    )
    trainer = PPOTrainer(config)
    engine, jobs = trainer.generator.rollouts.engine, []
    sample = engine.sample

    def killing(job, version):
        victim = servers[len(jobs) - 1] if jobs else None
        jobs.append(job)
        if victim:
            victim.freeze()  # it takes requests, and however quick it is, answers none
        answers = sample(job, version)
        if victim:
            time.sleep(0.2)  # all requests are under way; one that is not is lost all the same
            victim.kill()
        return answers

    engine.sample = killing
    with pytest.raises(EngineFailure, match="no rollout server could be used") as problem:
        trainer.train(PROMPTS)
    assert "weights as they were before this step" in str(problem.value)
    assert trainer.step == 2
    for server in servers:
        server.start()
    for server in servers:
        server.wait()
    results = PPOTrainer(replace(config, engine_timeout=60.0)).train(PROMPTS, resume=True)
    assert [metrics["step"] for metrics in results.metrics] == [1, 2, 3]
    assert results.metrics[1]["engine_retries"] > 0
    assert all(
        metrics["sampling_gap"] < 1e-3 for metrics in results.metrics
    )  # they had no adapter, and got it again


def save_model(folder, tied):
    tokenizer = byte_tokenizer()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 32,
    }
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        **sizes,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_full_fine_tuning_loads_the_weights_again_and_proves_them(tmp_path):
    config = replace(
        make(tmp_path, lora_r=0, learning_rate=1e-3), model_name=save_model(tmp_path / "untied", False)
    )
    trainer = PPOTrainer(config)
    for _ in range(3):
        outcome = trainer.ppo_step(["Why? TL;DR:", "x", "A longer prompt, TL;DR:"])
        assert outcome["sampling_gap"] < 1e-4
    assert outcome["kl_exact"] > 0.1  # it has moved far, and vLLM with it


def test_tied_embeddings_would_be_stale_and_the_proof_finds_it(tmp_path, monkeypatch):
    """The reason for refusing them, seen: without the refusal no wrong rollout is used either."""
    config = replace(
        make(tmp_path, lora_r=0, learning_rate=1e-2), model_name=save_model(tmp_path / "tied", True)
    )
    with pytest.raises(ValueError, match="tied embeddings"):
        PPOTrainer(config)
    monkeypatch.setattr(vllm_rollouts, "check_settings", lambda *given: None)
    trainer = PPOTrainer(config)
    trainer.ppo_step(["Why? TL;DR:", "x"])
    with pytest.raises(EngineFailure, match="did not load version 2"):
        trainer.ppo_step(["Why? TL;DR:", "x"])
