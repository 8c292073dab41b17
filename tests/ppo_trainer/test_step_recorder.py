"""Recording steps: it changes nothing, costs nothing where it is off, is there when an alarm comes, and
refuses what it cannot hold."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proxima.config import RewardSpec
from proxima.core.errors import RewardFailure
from proxima.core.linear4bit import Linear4bit
from proxima.ppo_trainer import PPOTrainer, StepRecorder, step_recordings
from proxima.ppo_trainer import weights as weights_of
from proxima.ppo_trainer.step_recorder import base_checksum, check_size, most_bytes
from proxima.runs import Alarm, read_bundle
from proxima.runs.run_files import bundle_paths
from proxima.tools.replay import replay_step
from tests.conftest import count_e
from tests.helpers import Crash, crash_at, difference, weights

PROMPTS = [f"prompt {i}" for i in range(12)]


@pytest.fixture
def small(make_config):
    """Runs of six steps of two prompts."""

    def make(**settings):
        return make_config(
            **{
                "batch_size": 2,
                "minibatch_size": 1,
                "ppo_epochs": 2,
                "lora_r": 2,
                "token_samples": 0,
                **settings,
            }
        )

    return make


def names(run):
    return [path.stem for path in bundle_paths(run)]


def test_recording_changes_no_bit_and_without_it_nothing_is_made(small, monkeypatch):
    made = []
    original = step_recordings.StepRecorder
    monkeypatch.setattr(step_recordings, "StepRecorder", lambda trainer: made.append(1) or original(trainer))
    runs = {}
    for every in (0, 1):
        trainer = PPOTrainer(small(record_steps=every, run_name=f"every-{every}"))
        runs[every] = trainer.train(PROMPTS), weights(trainer)
        assert len(made) == every
    (off, plain), (on, recorded) = runs.values()
    assert difference(plain, recorded) == 0
    without_times = [
        [{k: v for k, v in step.items() if not k.startswith("seconds")} for step in each.metrics]
        for each in (off, on)
    ]
    assert without_times[0] == without_times[1]
    assert names(off.run_folder) == []
    assert not (off.run_folder / "replay").exists()
    assert names(on.run_folder) == [f"step-{step:08d}" for step in range(1, 7)]


def test_every_nth_step_is_recorded_and_the_newest_stay(small, monkeypatch):
    monkeypatch.setattr(step_recordings, "KEPT", 2)
    results = PPOTrainer(small(record_steps=2)).train(PROMPTS)
    assert names(results.run_folder) == ["step-00000004", "step-00000006"]


def test_the_two_steps_up_to_an_alarm_are_recorded_once(small, monkeypatch):
    def alarm_from_step_three(history, **_):
        step = history[-1]["step"]
        return [Alarm("kl", f"too far at step {step}")] if step >= 3 else []

    monkeypatch.setattr("proxima.ppo_trainer.training_run.alarms", alarm_from_step_three)
    results = PPOTrainer(small(record_steps=100)).train(PROMPTS)
    assert names(results.run_folder) == ["alarm-00000002", "alarm-00000003"]
    for path in bundle_paths(results.run_folder):
        bundle = read_bundle(path)
        assert bundle.facts["reason"] == "kl: too far at step 3"
        assert replay_step(bundle).comparison.sentence == "the same bits in all 10 stages"


def test_the_first_two_steps_of_an_alarm_stay_beside_the_newest(small, monkeypatch):
    def every_step_from_two(history, **_):
        step = history[-1]["step"]
        return [Alarm(f"guard{step}", "bad")] if step >= 2 else []

    monkeypatch.setattr(step_recordings, "KEPT", 2)
    monkeypatch.setattr("proxima.ppo_trainer.training_run.alarms", every_step_from_two)
    results = PPOTrainer(small(record_steps=100)).train(PROMPTS)
    kept = {path.stem: read_bundle(path).facts["reason"] for path in bundle_paths(results.run_folder)}
    assert kept == {
        "alarm-00000001": "guard2: bad",
        "alarm-00000002": "guard2: bad",
        "alarm-00000005": "guard5: bad",
        "alarm-00000006": "guard6: bad",
    }


def test_while_a_step_runs_only_the_one_before_it_is_held(small, monkeypatch):
    made, held = [], []

    class Spy(step_recordings.Recordings):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    def reward(prompts, texts):
        held.append(len(made[0].steps))
        return count_e(prompts, texts)

    monkeypatch.setattr("proxima.ppo_trainer.training_run.Recordings", Spy)
    PPOTrainer(small(record_steps=100, rewards=(reward,))).train(PROMPTS)
    assert held == [0, 1, 1, 1, 1, 1]


def test_a_step_keeps_the_first_alarm_that_it_was_written_for(small, monkeypatch):
    def alarms(history, **_):
        step = history[-1]["step"]
        return [Alarm(f"guard{step}", "bad")] if step in (3, 4) else []

    monkeypatch.setattr("proxima.ppo_trainer.training_run.alarms", alarms)
    results = PPOTrainer(small(record_steps=100)).train(PROMPTS)
    reasons = {path.stem: read_bundle(path).facts["reason"] for path in bundle_paths(results.run_folder)}
    assert reasons == {
        "alarm-00000002": "guard3: bad",
        "alarm-00000003": "guard3: bad",
        "alarm-00000004": "guard4: bad",
    }


def test_a_step_run_again_after_a_rollback_replaces_its_recording(small, monkeypatch):
    raised = []

    def alarms(history, **_):
        if history[-1]["step"] != 3 or len(raised) == 2:
            return []
        raised.append(1)
        return [Alarm("kl", f"bad {len(raised)}")]

    monkeypatch.setattr("proxima.ppo_trainer.training_run.alarms", alarms)
    config = small(record_steps=100, on_guard="rollback", checkpoint_every=1)
    results = PPOTrainer(config).train(PROMPTS)
    last = bundle_paths(results.run_folder)[-1]
    assert (last.stem, read_bundle(last).facts["reason"]) == ("alarm-00000003", "kl: bad 2")


def test_a_rollback_leaves_the_recording_of_what_went_wrong(small, monkeypatch):
    raised = []

    def alarm_once(history, **_):
        if history[-1]["step"] == 3 and not raised:
            return [Alarm("kl", "too far")]
        return []

    monkeypatch.setattr("proxima.ppo_trainer.training_run.alarms", alarm_once)
    config = small(record_steps=100, on_guard="rollback", checkpoint_every=1)
    trainer = PPOTrainer(config)
    original = trainer.load

    def load(folder):
        raised.append(folder)
        original(folder)

    trainer.load = load
    results = trainer.train(PROMPTS)
    assert len(raised) == 1
    assert results.metrics[-1]["step"] == 6
    recorded = [read_bundle(path) for path in bundle_paths(results.run_folder)]
    assert [bundle.step for bundle in recorded] == [2, 3]
    assert replay_step(recorded[1]).comparison.first is None  # weights after it are those before the rollback


def test_a_resumed_run_records_what_an_uninterrupted_one_does(small):
    whole = PPOTrainer(small(record_steps=2, checkpoint_every=2, run_name="whole")).train(PROMPTS)
    config = small(record_steps=2, checkpoint_every=2, run_name="cut")
    with pytest.raises(Crash):
        crash_at(PPOTrainer(config), 5).train(PROMPTS)
    cut = PPOTrainer(config).train(PROMPTS, resume=True)
    assert names(whole.run_folder) == names(cut.run_folder) == [f"step-0000000{i}" for i in (2, 4, 6)]
    for one, other in zip(bundle_paths(whole.run_folder), bundle_paths(cut.run_folder), strict=True):
        left, right = read_bundle(one).tensors, read_bundle(other).tensors
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name].nan_to_num(), right[name].nan_to_num()) for name in left)


def test_a_step_that_fails_leaves_the_trainer_as_it_was(small):
    trainer = PPOTrainer(small())
    hook, recorder = trainer.on_phases, StepRecorder(trainer)
    with pytest.raises(Crash), recorder.step():
        raise Crash
    assert trainer.on_phases is hook


def fails_from(step, error):
    """A reward that works until a step."""
    calls = []

    def reward(prompts, texts):
        calls.append(1)
        if len(calls) >= step:
            raise error
        return count_e(prompts, texts)

    return reward


@pytest.mark.parametrize("name", ["a reward", "an update"])
def test_a_step_that_fails_leaves_a_recording_of_the_one_before_it(small, monkeypatch, name):
    reward = fails_from(3, OSError("the disk is gone")) if name == "a reward" else count_e
    trainer = PPOTrainer(small(record_steps=100, rewards=(reward,)))
    if name == "an update":  # fails when it has changed the weights
        original = trainer.model_trainer.update_models

        def update(*given):
            found = original(*given)
            if trainer.step == 2:
                raise RuntimeError("out of memory")
            return found

        monkeypatch.setattr(trainer.model_trainer, "update_models", update)
    error = RewardFailure if name == "a reward" else RuntimeError
    with pytest.raises(error) as raised:
        trainer.train(PROMPTS)
    (run,) = Path(trainer.config.run_dir).iterdir()
    assert names(run) == ["alarm-00000002"]
    bundle = read_bundle(bundle_paths(run)[0])
    assert bundle.facts["reason"] == f"the next step ended by {type(raised.value).__name__}"
    assert replay_step(bundle).comparison.first is None  # weights after it are those before the failure


def test_a_first_step_that_fails_leaves_no_recording(small):
    trainer = PPOTrainer(small(record_steps=100, rewards=(fails_from(1, OSError()),)))
    with pytest.raises(RewardFailure):
        trainer.train(PROMPTS)
    (run,) = Path(trainer.config.run_dir).iterdir()
    assert names(run) == []


def test_the_checksum_of_a_base_in_4_bits_covers_its_scales(small):
    backbone = PPOTrainer(small(quantize="nf4")).models.policy.backbone
    before = base_checksum(backbone)
    assert base_checksum(backbone) == before
    layer = next(each for each in backbone.network.modules() if isinstance(each, Linear4bit))
    scales = {name: each for name, each in layer.nf4.tensors.items() if name != "codes"}
    seen = {before}
    for name, each in scales.items():
        other = replace(layer.nf4, **{name: each + 1})
        weight, layer._nf4 = layer.nf4, other
        seen.add(base_checksum(backbone))
        layer._nf4 = weight
    assert len(seen) == 1 + len(scales) > 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lora_r": 0}, "does not work with full fine-tuning .lora_r 0.*set lora_r above 0"),
        ({"shard_base": True}, "does not work with shard_base"),
        ({"value_model": "tiny"}, "the value model on the policy's base"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_the_first_step(small, tiny, settings, reason):
    own = {name: tiny if value == "tiny" else value for name, value in settings.items()}
    with pytest.raises(ValueError, match=reason):
        PPOTrainer(small(record_steps=1, **own)).train(PROMPTS)


def test_a_step_that_would_be_too_large_is_refused(small, monkeypatch):
    monkeypatch.setattr("proxima.ppo_trainer.step_recorder.LARGEST_BUNDLE", 1000)
    with pytest.raises(ValueError, match=r"would take up to .* bytes .*, the most is 1,000; lower lora_r"):
        PPOTrainer(small(record_steps=1)).train(PROMPTS)


SAMPLING = {
    "top-p alone": {"top_k": 0, "top_p": 0.9},
    "top-k": {"top_k": 20},
    "all": {"top_k": 0, "top_p": 1.0},
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_what_a_step_may_take_counts_its_rollout(small, sampling):
    config = small(batch_size=8, minibatch_size=8, num_generations=2, max_new_tokens=32, **sampling)
    trainer = PPOTrainer(config)
    adapters, rollout = most_bytes(trainer)
    recorder = StepRecorder(trainer)
    for _ in range(2):  # before the first update the optimiser holds nothing
        with recorder.step():
            outcome = trainer.ppo_step(PROMPTS[:8])
    record = replace(recorder.record(outcome), after=weights_of(trainer))
    bundle = record.bundle()
    sizes = dict.fromkeys((True, False), 0)
    for name, tensor in bundle.tensors.items():
        if not name.startswith("tokens/prompt"):
            is_weight = name.startswith(("before", "after", "reference"))
            sizes[is_weight] += tensor.numel() * tensor.element_size()
    rollout *= bundle.tensors["tokens/mask"].shape[1] / 32  # if no response was as long as it may be
    assert 0.9 * adapters < sizes[True] < 1.1 * adapters
    texts = len(json.dumps(bundle.facts["tokens"]))
    assert 0.7 * rollout < sizes[False] + texts < 1.1 * rollout


def test_kept_sets_alone_may_be_too_large(small):
    many = {"batch_size": 11_000_000, "minibatch_size": 1_000_000, "max_new_tokens": 4}
    check_size(PPOTrainer(small(**many, top_k=0, top_p=1.0)))  # 3.5 of 4.3 GB
    with pytest.raises(
        ValueError, match=r"for responses of max_new_tokens with their kept sets\), the most is"
    ):
        check_size(PPOTrainer(small(**many, top_k=0, top_p=0.9)))  # 33 bytes for each of 44 M tokens more


def test_a_full_disk_loses_the_recording_and_not_the_run(small, monkeypatch, caplog):
    def full(*_):
        raise ValueError("cannot write it: No space left on device")

    monkeypatch.setattr(step_recordings, "write_bundle", full)
    with caplog.at_level(logging.WARNING, "proxima"):
        results = PPOTrainer(small(record_steps=3)).train(PROMPTS)
    assert len(results.metrics) == 6
    assert [r.message for r in caplog.records if "not recorded" in r.message] == [
        f"step {step} is not recorded: cannot write it: No space left on device" for step in (3, 6)
    ]


def test_no_secret_and_no_base_weight_is_written(small, monkeypatch):
    def reward(prompts, texts, api_key=""):
        return count_e(prompts, texts)

    spec = RewardSpec(reward, options={"api_key": "sk-very-secret"})
    results = PPOTrainer(small(record_steps=3, rewards=(spec,))).train(PROMPTS)
    for path in bundle_paths(results.run_folder):
        content = path.read_bytes()
        assert b"sk-very-secret" not in content
        bundle = read_bundle(path)
        assert "***" in json.dumps(bundle.facts["settings"]["rewards"])
        assert not [name for name in bundle.tensors if "base_layer" in name or "embed" in name]
