"""`InProcessEngine`: vLLM inside the training process.

It holds its own copy of the base beside the training side's. Every row of a batch uses the adapter: vLLM
would give a row without one that of the last slot.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import ref

import numpy
import torch

from proxima.core.errors import EngineFailure
from proxima.core.json_record import Record
from proxima.runtime import forked_random_state
from proxima.runtime.vllm.engine_abilities import SAMPLING_MASK, known_arguments
from proxima.runtime.vllm.rollout_job import (
    InvalidResponse,
    PolicyVersion,
    RolloutJob,
    SampledResponse,
    WeightCheck,
    parse_response,
)

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams

log = logging.getLogger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for
CPU_CACHE = (64 << 20, 4 << 30)  # least and most bytes of the KV cache on a CPU


_running: list[ref[LLM]] = []


def _stop_others() -> None:
    """Stop earlier engines. vLLM's process groups are global: an engine that is closed later would take them
    from the new one."""
    while _running:
        if (engine := _running.pop()()) is not None:
            try:
                engine.llm_engine.engine_core.shutdown()
            except AttributeError as error:
                raise ValueError(
                    f"this vLLM cannot stop the engine that an earlier trainer started here ({error}): use a "
                    "new process"
                ) from None


class InProcessEngine:
    """The only vLLM engine of the process: a newer one stops it. A new version is an adapter under a new id,
    or all weights reloaded."""

    retries = 0

    def __init__(
        self,
        model: str,
        device: torch.device,
        dtype: torch.dtype,
        lora_rank: int,
        gpu_memory: float,
        context: int,
        cache_bytes: int,
        trust_remote_code: bool,
        wants_masks: bool,
    ):
        """
        Args:
            model: folder or Hub id of the base.
            lora_rank: of the adapters; 0 = all weights are trained.
            gpu_memory: share of the GPU's memory.
            context: tokens of the longest sequence.
            cache_bytes: of the longest sequence's keys and values.
            trust_remote_code: run code that comes with the model.
            wants_masks: ask for the ids that each token is sampled from, where this vLLM can return them.
        """
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        settings = {"gpu_memory_utilization": gpu_memory, **_lora_settings(lora_rank)}
        if device.type == "cpu":
            torch._dynamo.config.disable = True  # compiling vLLM's small functions takes longer than they do
            settings |= _cpu_settings(context, cache_bytes)
        settings["trust_remote_code"] = trust_remote_code
        self._llm = _start(model, device, dtype, settings, wants_masks)
        _running.append(ref(self._llm))
        self._device = device
        self._newest = 0

    def load(self, version: PolicyVersion, check: WeightCheck) -> None:
        """Load a version and check it, before anything is sampled from it."""
        if version.number == self._newest:
            return
        if not version.adapter:
            self._reload(version)
        params = self._params(None, prompt_logprobs=0, max_tokens=1, top_k=1, seed=0)
        reply = self._run([check.ids], [params], version)[0]
        try:
            places = zip(reply.prompt_logprobs[1:], check.ids[1:], strict=True)
            found = [place[token].logprob for place, token in places]
            sampled = _logprobs(reply.outputs[0])[0]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise EngineFailure(
                "vLLM returned log-probabilities in a form that is not known here: install another release; "
                "docs/engines.md says which ran"
            ) from None
        try:
            check.check(found, sampled)
        except InvalidResponse as error:
            raise EngineFailure(
                f"vLLM did not load version {version.number} of the policy: {error}"
            ) from None
        self._newest = version.number

    def _reload(self, version: PolicyVersion) -> None:
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(version.folder)})
            self._llm.reset_prefix_cache()  # it holds what the old weights computed
        except Exception as error:
            raise EngineFailure(f"vLLM could not reload the policy's weights: {_reason(error)}") from error

    def sample(self, job: RolloutJob, version: PolicyVersion) -> Future[list[SampledResponse]]:
        params = [self._params(job, seed=seed) for seed in job.seeds]
        outputs = [reply.outputs[0] for reply in self._run(job.rows, params, version)]
        done: Future[list[SampledResponse]] = Future()
        try:
            done.set_result(
                [
                    parse_response(list(output.token_ids), _logprobs(output), job, _masks(output))
                    for output in outputs
                ]
            )
        except InvalidResponse as error:
            raise EngineFailure(f"vLLM returned an invalid response: {error}") from None
        return done

    def unload(self, version: PolicyVersion) -> None:
        remove = getattr(self._llm.llm_engine, "remove_lora", None)  # without it, newer ones replace old ones
        if version.adapter and remove is not None:
            remove(version.number)

    def _params(self, job: RolloutJob | None, **more: int) -> SamplingParams:
        from vllm import SamplingParams

        given: dict[str, object] = {"logprobs": 0, "detokenize": False, "ignore_eos": True}
        if job is not None:
            sampling = job.sampling
            given |= {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "max_tokens": sampling.max_new_tokens,
                "stop_token_ids": list(sampling.eos_ids),
            }
        return SamplingParams(**{**given, **more})

    def _run(
        self, rows: list[list[int]], params: list[SamplingParams], version: PolicyVersion
    ) -> list[RequestOutput]:
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest(version.name, version.number, str(version.folder)) if version.adapter else None
        prompts = [{"prompt_token_ids": row} for row in rows]
        with _random_state_kept(self._device):
            try:
                return self._llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
            except Exception as error:
                raise EngineFailure(f"vLLM failed: {_reason(error)}") from error


def _lora_settings(rank: int) -> dict[str, object]:
    if not rank:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": supported_rank(rank),
        "max_loras": 1,
        "max_cpu_loras": 2,
    }


def _cpu_settings(context: int, cache_bytes: int) -> dict[str, object]:
    least, most = CPU_CACHE
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": min(max(8 * cache_bytes, least), most),
        # to prefill a long prompt in chunks, vLLM rewinds a row's generator, which CPU generators cannot do
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(4096, context),
    }


def _start(model: str, device: torch.device, dtype: torch.dtype, settings: Record, wants_masks: bool) -> LLM:
    known = known_arguments(adapters="enable_lora" in settings)
    settings = settings | {
        "dtype": str(dtype).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "seed": 0,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    settings = {name: value for name, value in settings.items() if name in known}
    _stop_others()
    with _random_state_kept(device):
        if wants_masks and SAMPLING_MASK in known:
            try:
                return _new_engine(model, {**settings, SAMPLING_MASK: True})
            except ValueError as error:  # not on this device, say; it is refused before anything is loaded
                log.info("vLLM returns no sampling masks here, so kept sets are recomputed: %s", error)
        return _new_engine(model, settings)


def _new_engine(model: str, settings: Record) -> LLM:
    from vllm import LLM

    try:
        return LLM(model, **settings)
    except Exception as error:  # it raises anything
        raise ValueError(f"vLLM cannot start with {model!r}: {_reason(error)}") from error


def supported_rank(rank: int) -> int:
    """The smallest rank with a vLLM kernel that holds this one."""
    if rank > RANKS[-1]:
        raise ValueError(f"vLLM has no adapters of rank {rank}; the largest is {RANKS[-1]}")
    return next(size for size in RANKS if size >= rank)


def _logprobs(output: CompletionOutput) -> list[float]:
    """Log-probabilities of the sampled tokens."""
    return [place[token].logprob for place, token in zip(output.logprobs, output.token_ids, strict=True)]


def _masks(output: CompletionOutput) -> list[list[int]] | None:
    """The ids that each token was sampled from; None where this vLLM does not say."""
    mask = getattr(output, "sampling_mask", None)
    return None if mask is None else mask.token_ids


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the global random state: vLLM seeds and uses it."""
    python_state = random.getstate()
    numpy_state = numpy.random.get_state()
    with forked_random_state(device):
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


def _reason(error: Exception) -> str:
    """The last line that says something; after a failed validation there follow an address and the input."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith("For further information")]
    return lines[-1].partition(" [type=")[0] if lines else type(error).__name__
