"""The models of a run. In: `OldRun`. Out: model_name, rewards, value_model, LoRA settings, quantize."""

from __future__ import annotations

import math

from proxima.tools.migrate.migration import DEFAULTS, Migration, is_count, said
from proxima.tools.migrate.old_run import OldRun


def models(old: OldRun, new: Migration) -> None:
    """Policy and reference are model_name; value and reward model are the reward model's checkpoint."""
    policy = old.models.get("model", old.get("sft_model_path"))
    reward = old.models.get("reward_model")
    new.map("the policy" if "model" in old.models else "sft_model_path", policy, model_name=policy.value)
    reference = old.models.get("ref_model")
    if reference and (
        not reference.known or (reference.value is not None and reference.value != policy.value)
    ):
        new.dropped.append(
            f"ref_model = {said(reference)}: the reference is model_name, or sft_adapter on it"
        )
    if reward is None and old.get("reward_model_path").written:
        reward = old.get("reward_model_path")
    if reward is None or reward.value is None:
        new.unread.append("the reward: none is named; set rewards, or give --rewards (docs/rewards.md)")
    else:
        new.map("the reward model", reward, rewards=[reward.value])
        new.differs.append(
            "a classifier with the policy's tokenizer reads the policy's ids, as in TRL; any other reads the "
            "text (option eos)"
        )
    value = old.models.get("value_model", reward)
    if value is not None and not (value.known and value.value is None):
        new.map("the value model", value, value_model=value.value)
    if old.trust_remote_code and old.trust_remote_code.value is not False:
        why = (
            "a model's own code is run only where you say so yourself; add --trust-remote-code if it needs it"
        )
        new.leave("trust_remote_code", old.trust_remote_code, why)
    dtype = old.get("dtype")
    if (dtype.written or old.outside) and dtype.value in ("float32", "bfloat16", "float16", "auto"):
        new.map("dtype", dtype, dtype=dtype.value)
    elif dtype.written:
        new.leave("dtype", dtype, "it is not a dtype that can be read here; set dtype")


def lora(old: OldRun, new: Migration) -> None:
    use = old.get("use_peft")
    new.used.add("use_peft")
    if not use.known:
        new.map("use_peft", use, lora_r=0)
        return
    if not (old.peft or use.value):
        new.put("lora_r", 0, "no peft_config: TRL trained all weights")
        new.maps.append("no peft_config: TRL trained all weights -> lora_r = 0")
        return
    rank = old.get("lora_r")
    alpha = old.get("lora_alpha")
    targets = old.get("lora_target_modules")
    new.map("lora_r", rank, lora_r=rank.value)
    scale = alpha.value
    if old.get("use_rslora").value is True and is_count(rank.value) and is_count(scale):
        scale = round(scale * math.sqrt(rank.value))
        new.used.add("use_rslora")
        new.differs.append(
            f"use_rslora ({old.get('use_rslora').where}): lora_alpha = {scale} gives its scale, "
            "alpha / sqrt(r)"
        )
    new.map("lora_alpha", alpha, lora_alpha=scale)
    if not targets.known:
        new.map("lora_target_modules", targets, lora_targets="all-linear")
    elif isinstance(targets.value, (str, list)) and targets.value:
        names = [targets.value] if isinstance(targets.value, str) else targets.value
        new.map("lora_target_modules", targets, lora_targets=",".join(map(str, names)))
    else:
        new.put("lora_targets", "all-linear", "PEFT chose its targets by architecture")
        new.differs.append(
            "lora_target_modules is not given: PEFT chose by architecture (q_proj,v_proj for Qwen and "
            "Llama); set lora_targets to the same names, or keep all-linear"
        )
    new.differs.append(
        "with LoRA the value model is trained through an adapter, TRL trained all its weights; an adapter "
        f"usually needs a larger value_learning_rate (Proxima's own: {DEFAULTS.value_learning_rate:g})"
    )


FOUR_BITS = (
    "TRL's script quantised the value and reward model too; here it is the base, and networks beside it stay "
    "in dtype: a reward model of `proxima reward` and value_model: adapter share the base"
)
NESTED = "double quantisation is always on: scales of 8 bits, where TRL had float32 without it"


def four_bits(old: OldRun, new: Migration) -> None:
    """A base in 4 bits: NF4 and adapters, nothing else."""
    four, kind, nested = (
        old.get(name) for name in ("load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")
    )
    if four.known and not four.value:
        return
    new.used |= {"bnb_4bit_quant_type", "use_bnb_nested_quant"}
    if new.settings.get("lora_r") == 0:
        new.leave("load_in_4bit", four, "codes cannot be trained; set lora_r above 0 and quantize: nf4")
    elif kind.value != "nf4":
        new.used.add("load_in_4bit")
        new.leave("bnb_4bit_quant_type", kind, "the one 4-bit form here is nf4; set quantize: nf4 for it")
    else:
        new.map("load_in_4bit", four, quantize="nf4")
        new.differs.append(f"load_in_4bit ({four.where}): {FOUR_BITS}")
        if nested.value is not True:
            new.differs.append(f"use_bnb_nested_quant = {said(nested)}: {NESTED}")
