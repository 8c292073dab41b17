"""What the installed vLLM can do, found by asking it instead of by its version.

Its releases differ in the arguments they take. What rollouts need is looked for before anything is loaded;
what only tunes the engine is left out where it is unknown.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

SAMPLING_MASK = "return_sampling_mask"
"""The engine's argument: return the ids that each token is sampled from."""
TO_START = {
    "logprobs_mode": "log-probabilities of the distribution that it samples from",
    "skip_tokenizer_init": "token ids without a tokenizer",
}
FOR_ADAPTERS = {"enable_lora": "adapters", "max_lora_rank": "adapters of any rank"}
TO_SAMPLE = {
    "logprobs": "log-probabilities of sampled tokens",
    "prompt_logprobs": "log-probabilities of a prompt",
    "seed": "one seed per sequence",
    "stop_token_ids": "responses that end at chosen tokens",
}


def known_arguments(adapters: bool) -> set[str]:
    """The arguments that its engine takes; a `ValueError` in one line where vLLM or something needed is
    missing.

    Args:
        adapters: the policy is a LoRA adapter, handed over by name.
    """
    try:
        import vllm
        from vllm import LLM, EngineArgs, SamplingParams
    except ImportError as error:
        raise ValueError(
            f"engine vllm needs the package vllm here ({error}): pip install vllm, or give engine_urls"
        ) from None
    known = _parameters(LLM) | _parameters(EngineArgs)
    needed = TO_START | (FOR_ADAPTERS if adapters else {})
    missing = _missing(needed, known) + _missing(TO_SAMPLE, _parameters(SamplingParams))
    if adapters and not _has_adapters_by_name():
        missing.append("adapters by name (`vllm.lora.request.LoRARequest`)")
    if missing:
        version = getattr(vllm, "__version__", "of an unknown version")
        raise ValueError(
            f"the installed vLLM {version} cannot be used, it does not offer {', '.join(missing)}: install "
            "another release, or give engine_urls; docs/engines.md says which ran"
        )
    return known


def _has_adapters_by_name() -> bool:
    try:
        from vllm.lora.request import LoRARequest
    except ImportError:
        return False
    return {"lora_name", "lora_int_id", "lora_path"} <= _parameters(LoRARequest)


def _parameters(called: type) -> set[str]:
    return set(inspect.signature(called).parameters)


def _missing(needed: dict[str, str], known: Iterable[str]) -> list[str]:
    return [f"{what} (`{name}`)" for name, what in needed.items() if name not in known]
