"""The four models: `ModelSet`, from a config and a tokenizer, on as few networks as the config allows.

With LoRA all four roles share one frozen base. With full fine-tuning (lora_r = 0) the policy, and the value
model unless it is a head on the policy's trunk, are trainable copies; the frozen base is the reference and
also serves the reward model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from proxima.base_setup.loading import (
    ModelSettings,
    explain_loading,
    load_config,
    load_network,
    load_with_missing,
    pick_device,
    pick_dtype,
)
from proxima.base_setup.lora_setup import (
    adapter_task,
    add_adapter,
    copy_adapter,
    is_adapter,
    load_adapter,
    lora_config,
    merge_adapter,
    warn_of_another_base,
)
from proxima.base_setup.memory_rules import MOMENTS, held_bytes
from proxima.base_setup.micro_batches import MicroBatches
from proxima.base_setup.tokenizer_setup import (
    PAD_TOKEN,
    eos_token_ids,
    lacks_tokenizer,
    own_tokenizer,
    read_tokenizer,
    same_vocabulary,
)
from proxima.config import PPOConfig
from proxima.core.tokenizer import Tokenizer
from proxima.models import (
    HEAD_FILE,
    Backbone,
    BaseModel,
    EngineSettings,
    PolicyModel,
    RewardModel,
    SFTModel,
    ValueModel,
    pick_row,
    scalar_head,
    token_head,
)
from proxima.runtime import forked_random_state
from proxima.runtime.distributed import Lockstep, Processes, init_distributed, make_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass
class ModelSet:
    """The four roles, and what all components need to know of them."""

    policy: PolicyModel
    sft: SFTModel
    value: ValueModel | None  # None where advantages need none
    reward: RewardModel
    eos_ids: tuple[int, ...]  # tokens that end a response
    context_length: int | None  # most tokens of a sequence; None = no limit
    micro_batches: MicroBatches
    processes: Processes = field(default_factory=Processes)

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @property
    def value_shares_policy(self) -> bool:
        return self.value is not None and self.value.shares_policy


def build_models(config: PPOConfig, tokenizer: Tokenizer) -> ModelSet:
    """Load the base once and build the four roles on it. The global random state is left unchanged."""
    processes = replace(
        init_distributed(config.device, config.process_timeout)
    )  # a copy, changed by `_shard`
    device = pick_device(config.device)
    mesh = make_mesh(processes, device.type) if config.shard_base and processes.is_distributed else None
    if mesh is not None:  # loaded on the CPU: the full network need not fit on one GPU
        dtype = str(pick_dtype(config.dtype, device)).removeprefix("torch.")
        device = torch.device("cpu")
        config = replace(config, device="cpu", dtype=dtype)  # type: ignore[arg-type]  # one of the names
    base = Backbone(load_network(config, config.model_name, device))
    _check_vocabulary(config, base, tokenizer)
    with forked_random_state(device):
        torch.manual_seed(config.seed)
        sft = _reference(config, base)
        reward = load_reward(config, base)
        policy = _policy(config, base, sft)
        value = _value(config, base, sft, reward, policy, tokenizer) if config.has_critic else None
    trained: list[BaseModel] = [policy] if value is None else [policy, value]
    beside = _bytes_beside(base, [*trained, reward], trained)
    micro_batches = MicroBatches.of(config, config.minibatch_size, base, beside)
    micro_batches.may_halve = mesh is None
    micro_batches.release = partial(_release_caches, [policy.backbone, base])
    for role in (*trained, sft, reward):
        role.backbone.settings = EngineSettings(
            fast=config.engine != "plain",
            compiled=config.compile_layers,
            checkpointing=config.gradient_checkpointing,
            sampling_memory=lambda: micro_batches.sampling,
            pass_capacity=lambda: micro_batches.capacity,
        )
    if config.gradient_checkpointing:
        for backbone in _backbones(trained):
            if mesh is not None or backbone.decoder is None:
                backbone.checkpoint_layers()
    if mesh is not None:
        _shard([policy, sft, *trained[1:], reward], processes, mesh)
    eos_ids = eos_token_ids(tokenizer, base.network)
    return ModelSet(policy, sft, value, reward, eos_ids, base.context_length, micro_batches, processes)


def _bytes_beside(base: Backbone, roles: Sequence[BaseModel], trained: Sequence[BaseModel]) -> int:
    """What is in memory beside the base's weights: other networks, gradients and moments."""
    others = [backbone.network for backbone in _backbones(roles) if backbone is not base]
    weights = sum(map(held_bytes, others))
    learned = {id(weight): weight for role in trained for weight in role.parameters()}
    return weights + MOMENTS * sum(weight.numel() for weight in learned.values())


def _release_caches(backbones: Sequence[Backbone]) -> tuple[int, int]:
    """Free what sampling keeps; slots and tokens of the largest cache."""
    return max([backbone.release_generation() for backbone in backbones], key=math.prod)


def _check_vocabulary(config: PPOConfig, base: Backbone, tokenizer: Tokenizer) -> None:
    rows = base.network.get_input_embeddings().num_embeddings
    largest = max(index for index in tokenizer.get_vocab().values() if index != tokenizer.pad_token_id)
    if largest >= rows:
        raise ValueError(
            f"the tokenizer has ids up to {largest}, the model {config.model_name!r} only {rows} embeddings; "
            "use the tokenizer that was saved with the model"
        )


def _backbones(roles: Sequence[BaseModel]) -> list[Backbone]:
    """The networks of these roles, each once."""
    return list({id(role.backbone): role.backbone for role in roles}.values())


def _shard(roles: list[BaseModel], processes: Processes, mesh: DeviceMesh) -> None:
    """Shard the layers of every role's network over the processes."""
    lockstep = Lockstep(processes, [(role.backbone, role.adapter) for role in roles])
    for backbone in _backbones(roles):
        backbone.shard(mesh, lockstep)
    for role in roles:
        if role.head is not None:
            role.head.to(role.backbone.device)
    processes.before_collective = lockstep.join_remaining_passes


def _reference(config: PPOConfig, base: Backbone) -> SFTModel:
    if not config.sft_adapter:
        return SFTModel(base, None)
    warn_of_another_base(base, config.sft_adapter)
    return SFTModel(base, load_adapter(base, "sft", config.sft_adapter))


def load_reward(config: PPOConfig, base: Backbone, name: str = "reward") -> RewardModel:
    """The trained reward model that the config names (an adapter, or a separate network), or the base with an
    untrained head."""
    std = (base.hidden_size + 1) ** -0.5
    head = scalar_head(base.hidden_size, std, base.device)
    folders = [
        str(spec.source)
        for spec in config.rewards
        if not callable(spec.source) and has_head(str(spec.source))
    ]
    if len(folders) > 1:
        raise ValueError(f"only one reward model trained by proxima can be used in a run, got {folders}")
    if not folders:
        return RewardModel(base, None, head, "untrained")
    head = load_head(head, folders[0])
    if is_adapter(folders[0]):
        warn_of_another_base(base, folders[0])
        return RewardModel(base, load_adapter(base, name, folders[0]), head, folders[0])
    return RewardModel(Backbone(load_network(config, folders[0], base.device)), None, head, folders[0])


def _policy(config: PPOConfig, base: Backbone, sft: SFTModel) -> PolicyModel:
    if config.lora_r == 0:
        return PolicyModel(_trainable_copy(config, config.sft_adapter))
    if sft.adapter:
        return PolicyModel(base, copy_adapter(base, sft.adapter, "policy"))
    return PolicyModel(base, add_adapter(base, "policy", lora_config(config, base.network)))


def _value(
    config: PPOConfig,
    base: Backbone,
    sft: SFTModel,
    reward: RewardModel,
    policy: PolicyModel,
    tokenizer: Tokenizer,
) -> ValueModel:
    """The value model: initialised from the trained reward model if there is one, otherwise from the
    reference with a zero head."""
    head = scalar_head(base.hidden_size, 0.0, base.device)
    if config.value_model == "policy":
        value = ValueModel(policy.backbone, policy.adapter, head)
        value.shares_policy = True
        return value
    start = reward.adapter or sft.adapter
    if reward.source != "untrained":
        head.load_state_dict(_one_head(reward.head.state_dict()))  # type: ignore[union-attr]
    if is_adapter(config.value_model):
        warn_of_another_base(base, config.value_model)
        head = load_head(head, config.value_model, single=True)
        if config.lora_r == 0:
            return ValueModel(_trainable_copy(config, config.value_model), None, head)
        return ValueModel(base, load_adapter(base, "value", config.value_model), head)
    if config.value_model != "adapter":
        return _value_checkpoint(config, base, tokenizer)
    if reward.source != "untrained" and not reward.adapter:  # a full network: start from a copy of it
        network = load_network(config, reward.source, base.device, trains=config.lora_r == 0)
        return _on_network(config, Backbone(network), head)
    if config.lora_r == 0:
        return ValueModel(
            _trainable_copy(config, reward.source if reward.adapter else config.sft_adapter), None, head
        )
    if start:
        return ValueModel(base, copy_adapter(base, start, "value"), head)
    return ValueModel(base, add_adapter(base, "value", lora_config(config, base.network)), head)


def _value_checkpoint(config: PPOConfig, base: Backbone, tokenizer: Tokenizer) -> ValueModel:
    """A separate network with the policy's vocabulary: a causal LM, or a one-score classifier, whose head is
    used."""
    name = config.value_model
    network, missing = load_with_missing(
        config, name, base.device, AutoModelForSequenceClassification, trains=config.lora_r == 0
    )
    backbone = Backbone(network.base_model)
    head = scalar_head(backbone.hidden_size, 0.0, base.device)
    score = getattr(network, "score", None)
    if has_head(name):
        head = load_head(head, name, single=True)
    elif isinstance(score, torch.nn.Linear) and "score.weight" not in missing:
        head.load_state_dict(pick_row(score, 0).state_dict())
    need = base.network.get_input_embeddings().num_embeddings
    have = backbone.network.get_input_embeddings().num_embeddings
    if have < need:
        raise ValueError(
            f"value_model {name!r} has {have} embeddings, the policy {need}; they must share a tokenizer"
        )
    own = own_tokenizer(name, config.trust_remote_code)
    if own is not None and not same_vocabulary(tokenizer, own):
        raise ValueError(
            f"value_model {name!r} has another vocabulary than the policy {config.model_name!r}, so ids "
            "would mean other words; give a checkpoint of the same family, or leave value_model out"
        )
    return _on_network(config, backbone, head)


def _on_network(config: PPOConfig, backbone: Backbone, head: torch.nn.Linear) -> ValueModel:
    """A value model on a separate network, trained through an adapter or in full."""
    if config.lora_r == 0:
        backbone.network.requires_grad_(True)
        return ValueModel(backbone, None, head)
    return ValueModel(backbone, add_adapter(backbone, "value", lora_config(config, backbone.network)), head)


def _trainable_copy(config: PPOConfig, adapter_folder: str) -> Backbone:
    """A second copy of the base with all weights trainable, in float32, and with an adapter merged where one
    is named."""
    copied = Backbone(load_network(config, config.model_name, pick_device(config.device), trains=True))
    if adapter_folder:
        copied = merge_adapter(copied, adapter_folder)
    copied.network.requires_grad_(True)
    return copied


def has_head(folder: str) -> bool:
    """Whether the folder holds a reward or value model of this package, rather than a classifier of
    `transformers`."""
    return is_adapter(folder) or (Path(folder) / HEAD_FILE).is_file()


def load_head(head: torch.nn.Linear, folder: str, single: bool = False) -> torch.nn.Linear:
    """The head, or the heads of an ensemble, from a saved role's folder.

    Args:
        head: of the right size, to load one head into.
        single: where there are several, their mean.
    """
    path = Path(folder) / HEAD_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder!r} has no {HEAD_FILE}: it is an adapter without a scalar head of proxima's; "
            f"{_head_remedy(folder)}"
        )
    with explain_loading("head", folder):
        saved = load_file(path, device=str(head.weight.device))
        if single:
            saved = _one_head(saved)
        elif (count := len(saved["bias"])) > 1:
            # `skip_init` draws no random numbers
            head = torch.nn.utils.skip_init(
                torch.nn.Linear, head.in_features, count, device=head.weight.device
            )
        head.load_state_dict(saved)
    return head


def _one_head(saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The mean of the heads of an ensemble; a single head as it is."""
    if len(saved["bias"]) == 1:
        return saved
    return {name: tensor.mean(0, keepdim=True) for name, tensor in saved.items()}


def _head_remedy(folder: str) -> str:
    if adapter_task(folder) == "SEQ_CLS":
        return (
            "it is PEFT's adapter of a sequence classifier: merge it into its base (merge_and_unload), save "
            "that with its tokenizer, and give the new folder"
        )
    return "give the folder of a reward model (proxima reward writes one) or of a value model"


def load_classifier(
    config: ModelSettings, name: str, device: torch.device
) -> tuple[PreTrainedModel, Tokenizer, PretrainedConfig]:
    """A sequence classifier with all its labels, its own tokenizer, and its config as it was saved."""
    own = load_config(name, config.trust_remote_code)
    architectures = own.architectures or []
    labels = own.num_labels if any("SequenceClassification" in item for item in architectures) else 1
    network, missing = load_with_missing(config, name, device, AutoModelForSequenceClassification, labels)
    if any(not weight.startswith(network.base_model_prefix) for weight in missing):
        warnings.warn(
            f"{name!r} is not a sequence classifier ({architectures}); its score head is untrained",
            stacklevel=2,
        )
    if lacks_tokenizer(name):
        raise ValueError(
            f"there is no tokenizer beside the classifier in {name!r}; save the one it was trained with there"
        )
    tokenizer = read_tokenizer(name, config.trust_remote_code)
    tokenizer.padding_side = "right"
    tokenizer.truncation_side = "left"
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
        needs_pad = token_head(network) is None  # otherwise padding never reaches the network
        if needs_pad and len(tokenizer) > network.get_input_embeddings().num_embeddings:
            network.resize_token_embeddings(len(tokenizer))
    for settings in (network.config, network.config.get_text_config()):
        settings.pad_token_id = tokenizer.pad_token_id
    return network, tokenizer, own
