"""`InProcess`: vLLM inside the training process. In: jobs. Out: answers, as futures that are done.

It holds a base of its own beside the training side's. Every row of a batch has the adapter: rows without one
would get that of the last slot.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from weakref import ref

import numpy
import torch

from proxima.core.errors import EngineFailure
from proxima.runtime.vllm.rollout_job import Answer, Job, Probe, Version, WrongAnswer, read_answer

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for
CPU_CACHE = (64 << 20, 4 << 30)  # least and most bytes of the KV cache on a CPU


_running: list[ref[Any]] = []


def _stop_others() -> None:
    """One engine a process: vLLM's groups are the process's, and an engine that goes later takes them from
    all others."""
    while _running:
        if (engine := _running.pop()()) is not None:
            engine.llm_engine.engine_core.shutdown()


class InProcess:
    """One vLLM engine, the only one of the process: a newer one stops it. A new version is an adapter
    under a new id, or all weights loaded again."""

    retries = 0

    def __init__(
        self,
        model: str,
        device: torch.device,
        dtype: torch.dtype,
        rank: int,
        memory: float,
        context: int,
        cache: int,
        trust: bool,
    ):
        """
        Args:
            model: folder or Hub id of the base.
            rank: of the adapters; 0 = all weights.
            memory: share of the GPU's memory.
            context: tokens of the longest sequence.
            cache: bytes that its keys and values take.
            trust: run code that comes with the model.
        """
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        settings: dict[str, Any] = {"gpu_memory_utilization": memory}
        if device.type == "cpu":
            torch._dynamo.config.disable = True  # compiling vLLM's small functions takes longer than they do
            settings |= {
                "enforce_eager": True,
                "kv_cache_memory_bytes": min(max(8 * cache, CPU_CACHE[0]), CPU_CACHE[1]),
            }
            # cutting a long prompt in two, it winds a row's generator back, which generators on a CPU cannot
            # do
            settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, context)}
        if rank:
            settings |= {
                "enable_lora": True,
                "max_lora_rank": slots_for(rank),
                "max_loras": 1,
                "max_cpu_loras": 2,
            }
        try:
            from vllm import LLM
        except ImportError as error:
            raise ValueError(
                f"engine vllm needs the package vllm here ({error}): pip install 'vllm>=0.30', or give "
                "engine_urls"
            ) from None
        _stop_others()
        with _random_state_kept(device):
            try:
                self._llm = LLM(
                    model,
                    dtype=str(dtype).removeprefix("torch."),
                    trust_remote_code=trust,
                    skip_tokenizer_init=True,
                    logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
                    seed=0,
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                    **settings,
                )
            except Exception as error:  # it raises anything
                raise ValueError(f"vLLM cannot start with {model!r}: {_last_line(error)}") from error
        _running.append(ref(self._llm))
        self._device, self._newest = device, 0

    def use(self, version: Version, probe: Probe) -> None:
        """Take over a version and prove it, before anything is sampled from it."""
        if version.number == self._newest:
            return
        if not version.adapter:
            self._reload(version)
        sampled = self._params(None, prompt_logprobs=0, max_tokens=1, top_k=1, seed=0)
        reply = self._run([probe.ids], [sampled], version)[0]
        found = [
            place[token].logprob
            for place, token in zip(reply.prompt_logprobs[1:], probe.ids[1:], strict=True)
        ]
        try:
            probe.check(found, _logprobs(reply.outputs[0])[0])
        except WrongAnswer as error:
            raise EngineFailure(
                f"vLLM did not take over version {version.number} of the policy: {error}"
            ) from None
        self._newest = version.number

    def _reload(self, version: Version) -> None:
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(version.folder)})
            self._llm.reset_prefix_cache()  # it holds what the old weights computed
        except Exception as error:
            raise EngineFailure(
                f"vLLM could not load the policy's weights again: {_last_line(error)}"
            ) from error

    def sample(self, job: Job, version: Version) -> Future[list[Answer]]:
        given = [self._params(job, seed=seed) for seed in job.seeds]
        replies = self._run(job.rows, given, version)
        done: Future[list[Answer]] = Future()
        try:
            done.set_result(
                [
                    read_answer(list(item.outputs[0].token_ids), _logprobs(item.outputs[0]), job)
                    for item in replies
                ]
            )
        except WrongAnswer as error:
            raise EngineFailure(f"vLLM answered wrongly: {error}") from None
        return done

    def drop(self, version: Version) -> None:
        if version.adapter:
            self._llm.llm_engine.remove_lora(version.number)

    def _params(self, job: Job | None, **more: Any) -> Any:
        from vllm import SamplingParams

        given: dict[str, Any] = {"logprobs": 0, "detokenize": False, "ignore_eos": True}
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

    def _run(self, rows: list[list[int]], params: list[Any], version: Version) -> list[Any]:
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest(version.name, version.number, str(version.folder)) if version.adapter else None
        prompts: Any = [{"prompt_token_ids": row} for row in rows]
        with _random_state_kept(self._device):
            try:
                return self._llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
            except Exception as error:
                raise EngineFailure(f"vLLM failed: {_last_line(error)}") from error


def slots_for(rank: int) -> int:
    """The smallest rank that vLLM has room for."""
    if rank > RANKS[-1]:
        raise ValueError(f"vLLM has no adapters of rank {rank}; the largest is {RANKS[-1]}")
    return next(size for size in RANKS if size >= rank)


def _logprobs(output: Any) -> list[float]:
    """Of the chosen tokens."""
    return [place[token].logprob for place, token in zip(output.logprobs, output.token_ids, strict=True)]


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """vLLM seeds and uses the generators of the whole process."""
    before = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(before[0])
            numpy.random.set_state(before[1])


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
