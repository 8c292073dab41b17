"""The canary: setups that learn pass, and for every seeded fault the part at fault is the suspect."""

import math

import pytest
import torch

from proxima.cli import main
from proxima.core.errors import EngineFailure
from proxima.ppo_trainer import PPOTrainer, SequenceGenerator
from proxima.rewards import Samples
from proxima.tools.doctor import canary_run
from proxima.tools.doctor.canary_checks import canary, is_slow, rise_within_kl
from proxima.tools.doctor.canary_run import CanaryRun, PlantedReward, choose_class, plant, run_canary
from proxima.tools.doctor.examination import canary_findings
from proxima.world.tiny_models import byte_tokenizer
from tests.rollout_server import RolloutServer

PROMPTS = [f"Prompt {i}:" for i in range(48)]
SOUND = {
    "batch_size": 32,
    "minibatch_size": 16,
    "max_new_tokens": 8,
    "ppo_epochs": 2,
    "top_k": 0,
    "top_p": 1.0,
}


@pytest.fixture
def run_it(make_config):
    """The canary's finding for these settings."""
    return lambda **settings: canary(make_config(**{**SOUND, **settings}), PROMPTS)


@pytest.fixture
def few_steps(monkeypatch):
    """For faults of which more steps would show no more."""
    monkeypatch.setattr(canary_run, "STEPS", 8)


class Repeats:
    """Says the same at every turn, and likes some of what it hears."""

    def step(self, text):
        return " zyxw", 0.001 * sum(text.encode()), False


def suspect(finding):
    assert finding.level == "fail"
    assert finding.advice
    return finding.text.split("Suspect: ")[1].split(" (")[0]


# --- sound ---


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"lora_r": 0, "learning_rate": 1e-4, "rewards": ()}, marks=pytest.mark.long),
        pytest.param(
            {
                "adv_estimator": "grpo",
                "value_learning_rate": 1e-4,
                "num_generations": 4,
                "batch_size": 8,
                "whiten_advantages": False,
                "objective": "cispo",
            },
            marks=pytest.mark.long,
        ),
        pytest.param({"value_model": "policy", "engine": "plain", "top_k": 50}, marks=pytest.mark.long),
    ],
    ids=["adapters", "all weights", "groups", "shared trunk"],
)
def test_sound_setups_pass(run_it, settings):
    found = run_it(**settings)
    assert found.level == "ok", found.text
    assert "this setup learns" in found.text


# --- other models ---


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_a_sound_setup_of_another_family_passes(run_it, tiny_folders, family):
    found = run_it(model_name=tiny_folders[family])
    assert found.level == "ok", found.text


def test_the_rewards_are_asked_for_few_responses_and_the_class_is_chosen_on_many(make_config, few_steps):
    asked, chosen_on = [], []

    def spy(prompts, texts):
        asked.append(len(texts))
        return [float(len(text)) for text in texts]

    real = canary_run.choose_class

    def chosen(rows, eos_ids):
        chosen_on.append(len(rows))
        return real(rows, eos_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canary_run, "choose_class", chosen)
        for tokens in (8, 64):
            given = {"rewards": (spy,), "max_new_tokens": tokens, "learning_rate": 0.5}
            run_canary(make_config(**{**SOUND, **given}), PROMPTS)
    assert asked == [32, 32]
    assert chosen_on == [256, 64]


@pytest.mark.parametrize("truncation", [{}, {"top_k": 50, "top_p": 0.95}, {"top_p": 0.95}, {"top_k": 3}])
def test_a_model_that_writes_all_tokens_alike_is_not_measured(run_it, tmp_path, few_steps, truncation):
    """Under a frozen head with weights this small no adapter could raise any share by 0.05."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer, sizes = byte_tokenizer(), {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=300, eos_token_id=256, bos_token_id=None, num_attention_heads=4, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    found = run_it(model_name=str(tmp_path / "model"), **truncation)
    assert found.level == "warn"
    assert "not measured: the model writes every token about equally often" in found.text


# --- rewards that the planted one cannot stand in for ---


def test_rewards_that_score_nothing_fail_and_a_constant_is_a_warning(make_config, run_it):
    def broken(prompts, texts):
        raise RuntimeError("no such key")

    found = canary_findings(make_config(**SOUND, rewards=(broken,)), PROMPTS)
    assert [item.level for item in found] == ["fail"]
    assert "none of 32 responses a score" in found[0].text
    assert "no such key" in found[0].text
    constant = run_it(rewards=(lambda prompts, texts: [1.0] * len(texts),))
    assert constant.level == "warn"
    assert "your rewards score all 32 responses the same" in constant.text


# --- seeded faults ---


def tiny_scores(prompts, texts):
    return [1e-4 * len(text.encode()) for text in texts]


@pytest.mark.parametrize(
    ("settings", "part", "text"),
    [
        ({"learning_rate": 1e-300}, "learning rate", "no weight has changed"),
        pytest.param(
            {"learning_rate": 1e-8},
            "learning rate",
            "log-probabilities have moved by",
            marks=pytest.mark.long,
        ),
        ({"learning_rate": 0.5}, "learning rate", "the KL is above"),
        ({"max_grad_norm": 1e-15}, "learning rate", "too little for any log-probability to follow"),
        pytest.param(
            {"kl_coef": 50.0, "rewards": ()},
            "KL coefficient",
            "without a KL penalty it rises",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"rewards": (tiny_scores,)},
            "reward scale",
            "with rewards of mean 0 and unit variance it rises",
            marks=pytest.mark.long,
        ),
        ({"clip_rewards": 1e-4}, "reward scale", "reach PPO as one number, 0.0001"),
        ({"cut_responses": "leave_out"}, "mask", "of the sampled tokens are trained on"),
        (
            {"critic_warmup_until": 0.999, "value_learning_rate": 1e-300},
            "no gradient",
            "the policy was not updated in 8 steps",
        ),
    ],
    ids=["rate 0", "rate low", "rate high", "cut gradients", "KL", "scale", "clipped", "left out", "warm-up"],
)
def test_settings_that_cannot_learn_are_suspected(run_it, request, settings, part, text):
    if part in ("mask", "no gradient") or "max_grad_norm" in settings:
        request.getfixturevalue("few_steps")
    found = run_it(**settings)
    assert suspect(found) == part, found.text
    assert text in found.text


@pytest.fixture
def broken(monkeypatch):
    """Every trainer of the canary is changed by this function."""

    def use(spoil):
        real = canary_run.PPOTrainer

        def made(config):
            trainer = real(config)
            spoil(trainer)
            return trainer

        monkeypatch.setattr(canary_run, "PPOTrainer", made)

    return use


def detach(trainer):
    trainer.models.policy.adapter = None


def test_an_adapter_that_is_not_attached_is_suspected(run_it, broken):
    broken(detach)
    found = run_it()
    assert suspect(found) == "adapter not attached"
    assert "no gradient reaches them" in found.text


@pytest.mark.long
def test_an_adapter_without_effect_on_the_forward_pass_is_suspected(run_it, broken):
    """Its weights are trained, but every pass reads those of the start."""

    def freeze(trainer):
        real = trainer.generator.score
        first = [weight.detach().clone() for weight in trainer.model_trainer.policy_parameters]

        def swapped(tokens, function):
            now = [weight.data for weight in trainer.model_trainer.policy_parameters]
            for weight, old in zip(trainer.model_trainer.policy_parameters, first, strict=True):
                weight.data = old
            try:
                return function(tokens)
            finally:
                for weight, new in zip(trainer.model_trainer.policy_parameters, now, strict=True):
                    weight.data = new

        trainer.generator.score = lambda tokens: swapped(tokens, real)
        sample = trainer.generator.sample
        trainer.generator.sample = lambda prompts, step=0: sample(prompts, step, reference=True)

    broken(freeze)
    assert suspect(run_it()) == "adapter not attached"


def test_a_graph_that_is_cut_is_suspected(run_it, broken):
    def cut(trainer):
        real = trainer.models.policy.response_hidden
        trainer.models.policy.response_hidden = lambda tokens: real(tokens).detach()

    broken(cut)
    found = run_it()
    assert suspect(found) == "no gradient"
    assert "although log-probabilities follow the weights" in found.text


def test_a_graph_that_is_cut_below_the_head_is_suspected_where_all_weights_train(run_it, broken, few_steps):
    """The head goes on learning, so gradients are there and the reward may rise a little."""

    def cut(trainer):
        real = trainer.models.policy.response_hidden
        trainer.models.policy.response_hidden = lambda tokens: real(tokens).detach()

    broken(cut)
    found = run_it(lora_r=0, learning_rate=1e-5)
    assert suspect(found) == "no gradient", found.text
    assert "% of the trained weights" in found.text


@pytest.mark.long
def test_a_setup_of_a_further_family_that_trains_all_weights_passes(run_it, tmp_path):
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    tokenizer, sizes = byte_tokenizer(), {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.2,
        **sizes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "neox")
    tokenizer.save_pretrained(tmp_path / "neox")
    found = run_it(model_name=str(tmp_path / "neox"), lora_r=0, learning_rate=1e-4)
    assert found.level == "ok", found.text


def test_weights_that_are_not_synchronised_to_the_sampler_are_suspected(run_it, broken, few_steps):
    def stale(trainer):
        real = trainer.generator.sample
        trainer.generator.sample = lambda prompts, step=0: real(prompts, step, reference=True)

    broken(stale)
    found = run_it()
    assert suspect(found) == "weights not synchronised to the sampler"
    assert "per token, and by" in found.text


def test_an_engine_that_refuses_new_weights_is_suspected(run_it, monkeypatch):
    real = SequenceGenerator.sample

    def refuse(self, prompts, step=0, reference=False):
        if step == 1:
            raise EngineFailure("it has another model or other weights")
        return real(self, prompts, step, reference)

    monkeypatch.setattr(SequenceGenerator, "sample", refuse)
    found = run_it()
    assert suspect(found) == "weights not synchronised to the sampler"
    assert "another model" in found.text


class StaleServer(RolloutServer):
    """It confirms every new adapter, and goes on with the first."""

    def _complete(self, asked):
        self.model.set_adapter(next(iter(self.model.peft_config)))
        return super()._complete(asked)


@pytest.mark.long
@pytest.mark.parametrize("kind", [RolloutServer, StaleServer])
def test_a_server_that_keeps_old_weights_is_told_from_a_sound_one(run_it, tiny, monkeypatch, kind):
    monkeypatch.setattr(canary_run, "COMPARED_WITH", 64)
    monkeypatch.setattr(canary_run, "PLANTED_ON", 512)
    server = kind(tiny)
    try:
        found = run_it(engine="vllm", engine_urls=(server.url,), engine_timeout=60.0, learning_rate=2e-3)
    finally:
        server.close()
    if kind is RolloutServer:
        assert found.level == "ok", found.text
    else:
        assert suspect(found) == "weights not synchronised to vLLM", found.text


# --- the parts ---


def test_the_class_holds_about_a_third_of_what_is_written():
    rows = [[1, 1, 1, 1, 2, 2, 3, 4, 5, 0]] * 3
    members = choose_class(rows, eos_ids=(0,))
    planted = PlantedReward(members, (0,), gain=2.0, offset=1.0)
    assert 0 not in members
    assert planted.share(rows[0]) == pytest.approx(1 / 3)
    assert planted.share([0]) == 0
    samples = Samples(["p"], ["t"], [sorted(members)], [False])
    assert planted(samples).sequence == [3.0]


def test_what_an_environment_wrote_is_neither_in_the_class_nor_counted(make_config):
    config = make_config(environment=Repeats, rewards=(), max_new_tokens=4, max_turns=3, temperature=1.5)
    trainer = PPOTrainer(config)
    written = trainer.generator.sample(PROMPTS[:16])
    assert written.observed.any()
    planted = plant(trainer, written, unit=False)
    chosen = {int(token) for token in written.response_ids[written.mask]}
    assert planted.members <= chosen
    planted(Samples.of_tokens(written))
    own = [ids[mask].tolist() for ids, mask in zip(written.response_ids, written.mask, strict=True)]
    assert planted.seen[-1] == [planted.share(ids) for ids in own]
    scores = trainer.reward_computer.score_tokens(written).total
    rewards = torch.tensor(planted(Samples.of_tokens(written)).sequence)
    assert rewards.std().item() == pytest.approx(scores.std().item(), rel=1e-4)


def test_the_planted_reward_has_the_mean_and_spread_of_the_configured_one(make_config):
    trainer = PPOTrainer(make_config(max_new_tokens=8, rewards=(tiny_scores,)))
    written = trainer.generator.sample(PROMPTS[:16])
    planted = plant(trainer, written, unit=False)
    scores = trainer.reward_computer.score_tokens(written).total
    rewards = torch.tensor(planted(Samples.of_tokens(written)).sequence)
    assert rewards.mean().item() == pytest.approx(scores.mean().item(), rel=1e-4)
    assert rewards.std().item() == pytest.approx(scores.std().item(), rel=1e-4)
    unit = torch.tensor(plant(trainer, written, unit=True)(Samples.of_tokens(written)).sequence)
    assert unit.mean().item() == pytest.approx(0, abs=1e-5)
    assert unit.std(correction=0).item() == pytest.approx(1, rel=1e-5)


def test_a_rise_counts_when_it_is_large_and_certain_and_within_the_kl(make_config):
    def run(share, kl=0.1, count=32):
        shares = [[share - 0.1, share + 0.1] * (count // 2)] * 3
        found = CanaryRun(make_config(), [0.2, 0.4] * 32, [0.0, 1.0], shares)
        found.steps = [{"kl_exact": 8 * kl, "response_length": 8.0}] * 3
        return found

    assert run(0.45).passed
    assert not run(0.34).rose  # less than 0.05
    assert not run(0.42, count=2).rose  # 0.12, with a standard error of 0.05
    assert run(0.45, kl=1.3).rose
    assert not run(0.45, kl=1.3).passed  # above ln(1 / 0.3)
    assert not run(0.45, kl=math.nan).passed


def test_how_far_a_share_can_rise_follows_from_the_kl_coefficient(make_config):
    """Two tokens per response, each worth 1.5: log-odds of 1.5 at a coefficient of 1."""
    found = CanaryRun(make_config(kl_loss_coef=0.25), [0.0, 1.0, 0.0, 1.0], [2.0, 5.0, 2.0, 5.0])
    for kl_coef, share in ((0.75, 1 / (1 + math.exp(-1.5))), (1e6, 0.5), (1e-9, 1 / (1 + math.exp(-6.0)))):
        found.steps = [{"kl_coef": kl_coef, "response_length": 2.0}]
        assert rise_within_kl(found) == pytest.approx(share - 0.5, abs=1e-6)


def test_a_run_is_slow_where_its_updates_go_the_right_way_beyond_chance(make_config):
    """A token of the class gained `towards` more than another: of a share of 0.3, times 0.21."""
    found = CanaryRun(make_config(), [0.2, 0.4] * 32, [0.0, 1.0])
    found.steps = [{"kl_exact": 0.1, "response_length": 8.0}]
    for towards, error, slow in (
        (0.05, 0.0, True),
        (0.04, 0.0, False),
        (0.1, 0.02, True),
        (0.1, 0.03, False),
    ):
        found.towards, found.towards_error = towards, error
        assert is_slow(found) == slow


def test_a_model_that_always_writes_the_same_has_nothing_to_plant(make_config):
    found = canary(make_config(top_k=1), PROMPTS[:1])
    assert found.level == "warn"
    assert "not measured" in found.text


def test_nothing_is_written_and_the_same_settings_give_the_same_run(make_config, tmp_path, few_steps):
    config = make_config(**{**SOUND, "batch_size": 8, "minibatch_size": 8})
    assert run_canary(config, PROMPTS).shares == run_canary(config, PROMPTS).shares
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("few_steps")
def test_the_command_runs_it_and_exits_with_1_where_nothing_is_learned(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    flags = f"--model-name {tiny} --data prompts.txt --rewards length_band,low=1,high=9 --max-new-tokens 8"
    sizes = "--batch-size 16 --minibatch-size 16 --ppo-epochs 1 --critic-warmup-until 0.999"
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *flags.split(), *sizes.split(), "--value-learning-rate", "0", "--canary"])
    out = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 1
    assert "fail canary" in out
    assert "Suspect: no" in out
