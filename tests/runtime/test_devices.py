"""Devices other than CPU and CUDA, with Apple's MPS pretended: what is chosen, what is sent to it, what is kept."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from proxima import PPOConfig, PPOTrainer
from proxima.base_setup import MicroBatches
from proxima.base_setup.loading import pick_device, pick_dtype
from proxima.cli.demo_command import Demo
from proxima.config import FinetuningConfig, RewardConfig
from proxima.core.types import Prompt
from proxima.finetuning import RewardTrainer, SFTTrainer
from proxima.models import ScoreUnit
from proxima.models.backbone import Backbone
from proxima.rewards.endings import Readings, compare_endings
from proxima.runs.checkpoint.checkpoint_tensors import (
    load_random_state,
    random_numbers,
    same_random_state,
    save_random_tensors,
)
from proxima.runtime import devices
from proxima.runtime.distributed import init_distributed
from proxima.tools.doctor.fit_trial import limit_memory
from tests.finetuning.test_finetuning import DEMONSTRATIONS, PREFERENCES
from tests.rewards.test_foreign_rewards import made_up

CPU, MPS = torch.device("cpu"), torch.device("mps")


class PretendedMPS(TorchFunctionMode):
    """What is sent to `mps`, and what is computed from it, is marked and stays on the CPU. Like the real device, it
    has no float64."""

    def __init__(self, rounds=False, bfloat16=True):
        super().__init__()
        self.sent, self.rounds, self.bfloat16 = 0, rounds, bfloat16

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        before = self.sent
        given = [*args, *kwargs.values()]
        leaves = func is torch.Tensor.cpu or any(named(value, "cpu") for value in given)
        stays = any(map(is_marked, given))
        result = func(
            *(self.real(value) for value in args),
            **{name: self.real(value) for name, value in kwargs.items()},
        )
        if not isinstance(result, torch.Tensor):
            return result
        if leaves:
            return result.view_as(result) if stays else result
        return self.marked(result) if stays or self.sent > before else result

    def real(self, value):
        if named(value, "mps"):
            self.sent += 1
            return CPU
        return value

    def marked(self, result):
        if result.dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support it"
            )
        if result.dtype == torch.bfloat16 and not self.bfloat16:
            raise TypeError("BFloat16 is not supported on MPS")
        if result.dtype == torch.int64 and self.rounds:
            result = result.float().long()
        result.on_mps = True
        return result


def is_marked(value):
    """A tensor, or one in a list, as `torch.cat` takes them."""
    if isinstance(value, list | tuple):
        return any(map(is_marked, value))
    return isinstance(value, torch.Tensor) and getattr(value, "on_mps", False)


def named(value, device):
    return isinstance(value, str | torch.device) and str(value) == device


def pretend(monkeypatch, kind, count=1):
    """What torch's accelerator interface reports."""
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.fixture
def mps(monkeypatch):
    """The device as torch would report it, with a random state of its own."""
    state = {"now": torch.arange(4, dtype=torch.uint8)}

    def now():
        return state["now"].clone()

    pretend(monkeypatch, "mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", now)
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda new: state.update(now=new))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    for probe in (devices.noise_problem, devices.default_dtype):
        probe.cache_clear()
    yield state
    for probe in (devices.noise_problem, devices.default_dtype):
        probe.cache_clear()


def test_auto_takes_mps_after_cuda_and_before_the_cpu(mps, monkeypatch):
    with PretendedMPS():
        assert pick_device("auto") == MPS
    for kind in ("cuda", None):
        pretend(monkeypatch, kind)
        assert pick_device("auto").type == (kind or "cpu")


def test_another_accelerator_that_torch_knows_is_taken_if_it_computes_as_a_cpu_does(monkeypatch, caplog):
    """By no name: whatever torch's accelerator interface reports."""
    pretend(monkeypatch, "xpu", 2)
    monkeypatch.setattr(devices, "noise_problem", lambda device: "")
    assert pick_device("auto").type == "xpu"
    taken = {}
    own = SimpleNamespace(
        get_rng_state_all=lambda: [torch.zeros(2), torch.ones(2)],
        set_rng_state=lambda state, index: taken.update({index: state.tolist()}),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: own)
    states = devices.random_states()
    devices.set_random_states({**states, "xpu.2": torch.zeros(2), "cuda.0": torch.zeros(2)})
    assert taken == {0: [0, 0], 1: [1, 1]}
    taken.clear()
    with same_random_state():  # an evaluation changes nothing that training draws
        drawn = torch.rand(3)
        assert taken == {}
    assert taken == {0: [0, 0], 1: [1, 1]}
    with same_random_state():
        assert torch.equal(torch.rand(3), drawn)
    own.is_initialized = lambda: False  # what has not been used is not started
    own.get_rng_state_all = None
    with same_random_state():
        pass
    monkeypatch.setattr(devices, "noise_problem", lambda device: "it rounds")
    assert pick_device("auto").type == "cpu"
    assert "device auto is the CPU, not xpu: it rounds" in caplog.text


def test_several_processes_do_not_share_mps(mps, monkeypatch):
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with PretendedMPS():
        assert pick_device("auto").type == "cpu"
    with pytest.raises(ValueError, match="device 'mps' names one GPU for 2 processes"):
        init_distributed("mps")


def test_a_device_with_other_noise_is_left_for_the_cpu_and_named(mps, monkeypatch, caplog):
    with PretendedMPS(rounds=True), caplog.at_level(logging.WARNING):
        assert pick_device("auto").type == "cpu"
    assert "not mps: it computes other sampling noise than a CPU" in caplog.text
    monkeypatch.setattr(torch, "empty", lambda *shape, device: type("Empty", (), {"device": MPS}))
    with (
        PretendedMPS(rounds=True),
        pytest.raises(ValueError, match=r"'mps' cannot be used .*use --device cpu"),
    ):
        pick_device("mps")


@pytest.mark.parametrize(("bfloat16", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_type_of_weights_is_probed(mps, bfloat16, expected):
    with PretendedMPS(bfloat16=bfloat16):
        assert pick_dtype("auto", MPS) == expected
        assert pick_dtype("float16", MPS) == torch.float16


def test_random_states_of_mps_are_forked_saved_and_restored(mps, tmp_path):
    before = mps["now"].clone()
    for kept in (devices.forked_random_state(MPS), same_random_state()):
        with kept:
            mps["now"] = before + 1
        assert torch.equal(mps["now"], before)
    save_random_tensors(tmp_path / "random.safetensors")
    plain, mps["now"] = random_numbers(), before + 1
    load_random_state(tmp_path / "random.safetensors", plain)
    assert torch.equal(mps["now"], before)


def test_a_state_of_mps_is_not_taken_for_one_of_cuda(monkeypatch):
    pretend(monkeypatch, "cuda")
    taken = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: taken.append(index))
    states = {"mps.0": torch.zeros(4), "cuda.0": torch.zeros(4), "cuda.1": torch.zeros(4)}
    devices.set_random_states(states)
    assert taken == [0]


def test_the_memory_of_a_gpu_is_asked_for_and_limited_where_auto_names_no_index(monkeypatch):
    """Torch refuses a device without an index there."""
    pretend(monkeypatch, "cuda")
    shares = {0: 0.5, 1: 0.25}

    def index(device):
        return 0 if device is None else torch._utils._get_device_index(device)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda device=None: shares[index(device)]
    )
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, device=None: shares.update({index(device): share}),
    )
    auto = pick_device("auto")
    assert auto.index is None
    assert [devices.device_memory(each) for each in (auto, torch.device("cuda", 1))] == [500, 250]
    limit_memory(auto, 700)
    assert devices.device_memory(auto) == 700


def test_the_demo_stays_on_the_cpu(mps, monkeypatch):
    asked = []
    monkeypatch.setattr("proxima.world.demo.run_demo", lambda *_, device, **__: asked.append(device))
    with PretendedMPS():
        Demo().run()
        Demo(device="mps").run()
    assert asked == ["cpu", "mps"]


def test_a_lack_of_memory_on_mps_halves_the_micro_batches():
    tries = []

    def work():
        tries.append(batches.size)
        if len(tries) < 3:
            raise RuntimeError("MPS backend out of memory (MPS allocated: 9 GB, max allowed: 9 GB).")
        return "done"

    batches = MicroBatches(8, 4096, 8)
    assert batches.run(work, longest=16) == "done"
    assert tries == [8, 4, 2]
    with pytest.raises(RuntimeError, match="another"):
        batches.run(lambda: (_ for _ in ()).throw(RuntimeError("another problem")), longest=16)


GROUPS = {"num_generations": 2, "whiten_advantages": False}


def test_units_and_endings_of_reward_models_send_no_float64_to_mps():
    scores = torch.arange(40.0)
    read, samples = made_up({"append": 40.0, "leave": 1.0})
    pairs = [
        Prompt(prompt, prompt.columns | {"chosen": "good", "rejected": "bad"}) for prompt in samples.prompts
    ]

    def read_there(given, how):
        found = read(given, how)
        return Readings(found.scores.to("mps"), found.hidden.to("mps"), found.weight.to("mps"))

    with PretendedMPS():
        assert ScoreUnit.of(scores.to("mps"), "a reward").mean == 19.5
        for prompts, why in ((samples.prompts, "separates 32 samples"), (pairs, "held-out preferences")):
            ending = compare_endings(read_there, replace(samples, prompts=prompts))
            assert ending.how == "append"
            assert why in ending.why


@pytest.mark.parametrize("trainer", [SFTTrainer, RewardTrainer])
def test_fine_tuning_sends_no_float64_to_mps(mps, tiny, tmp_path, monkeypatch, trainer):
    monkeypatch.setattr(PreTrainedModel, "device", property(lambda self: MPS))
    monkeypatch.setattr("proxima.finetuning.finetuning_trainer.pick_device", lambda name: MPS)
    settings = {"model_name": str(tiny), "batch_size": 4, "run_dir": str(tmp_path)}
    rewards = trainer is RewardTrainer
    config = RewardConfig(**settings, ensemble=2) if rewards else FinetuningConfig(**settings)
    examples = DEMONSTRATIONS if trainer is SFTTrainer else PREFERENCES
    with PretendedMPS() as pretended:
        made = trainer(config)
        for weight in made.backbone.network.state_dict(keep_vars=True).values():
            weight.on_mps = True
        results = made.train(examples[:12], examples[:4])
    assert pretended.sent > 10
    assert results.best["validation_loss"] > 0


@pytest.mark.parametrize(
    ("known", "method"),
    [
        (True, {}),
        (False, {}),
        *((True, {"adv_estimator": name, **GROUPS}) for name in ("rloo", "grpo", "reinforce_plus_plus")),
    ],
)
def test_a_step_sends_no_float64_to_mps_and_takes_the_reference_path(
    mps, tiny, tmp_path, monkeypatch, known, method
):
    """Of a family that the fast path knows, and of one that is probed; by every kind of advantage."""
    monkeypatch.setattr(Backbone, "known", property(lambda self: known))
    monkeypatch.setattr(PreTrainedModel, "device", property(lambda self: MPS))
    monkeypatch.setattr("proxima.base_setup.model_setup.pick_device", lambda name: MPS)
    settings = {"batch_size": 2, "minibatch_size": 2, "max_new_tokens": 4, "run_dir": str(tmp_path), **method}
    rewards = [lambda prompts, texts: [float(len(text)) for text in texts]]
    with PretendedMPS() as pretended:
        trainer = PPOTrainer(PPOConfig(model_name=str(tiny), rewards=rewards, device="mps", **settings))
        for weight in trainer.models.policy.backbone.network.state_dict(keep_vars=True).values():
            weight.on_mps = True
        results = trainer.ppo_step(["one prompt", "and another one"])
    assert pretended.sent > 10
    assert trainer.models.policy.backbone.decoder is None
    assert results["policy_loss"] == results["policy_loss"]
