"""A package `vllm` in the form of the real one, with `transformers` and PEFT behind it: what an engine offers,
or lacks, is chosen by a test."""

import sys
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType, SimpleNamespace

from tests.rollout_server import AdapterModel

ARGUMENTS = [
    "model",
    "dtype",
    "trust_remote_code",
    "skip_tokenizer_init",
    "logprobs_mode",
    "seed",
    "enable_lora",
    "max_lora_rank",
    "max_loras",
    "gpu_memory_utilization",
    "enforce_eager",
    "max_num_batched_tokens",
    "return_sampling_mask",
]  # not those that only tune a newer release
SAMPLING = [
    "temperature",
    "top_k",
    "top_p",
    "max_tokens",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "stop_token_ids",
    "ignore_eos",
    "detokenize",
]


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


def install(monkeypatch, without=(), refuses_masks=False, **model_settings):
    """Put the package in place; returns the list of engines that are started."""
    started = []
    names = [(name, object, field(default=None)) for name in SAMPLING if name not in without]

    class LLM:
        def __init__(self, model, **given):
            unknown = set(given) - (set(ARGUMENTS) - set(without))
            assert not unknown, f"EngineArgs got unexpected arguments {unknown}"
            if given.get("return_sampling_mask") and refuses_masks:
                raise ValueError(
                    "1 validation error\n  requires Model Runner V2 [type=value_error]\n    For further information visit x"
                )
            self.given, self.behind = given, AdapterModel(model, **model_settings)
            calls = {
                "remove_lora": lambda number: True,
                "engine_core": SimpleNamespace(shutdown=lambda: None),
            }
            self.llm_engine = SimpleNamespace(
                **{name: call for name, call in calls.items() if name not in without}
            )
            started.append(self)

        def generate(self, prompts, params, use_tqdm, lora_request):
            if lora_request.lora_name not in self.behind.loaded:
                self.behind._load(lora_request.lora_name, lora_request.lora_path)
            self.behind.model.set_adapter(lora_request.lora_name)
            return [
                self._output(prompt["prompt_token_ids"], asked)
                for prompt, asked in zip(prompts, params, strict=True)
            ]

        def _output(self, ids, asked):
            given = {name: value for name, value in vars(asked).items() if value is not None}
            reply = self.behind._complete(
                {"temperature": 1.0, "top_p": 1.0, **given, "prompt": ids, "model": ""}
            )
            (choice,) = reply["choices"]
            response = choice["token_ids"]
            numbers = zip(response, choice["logprobs"]["token_logprobs"], strict=True)
            masks = self.behind.masks_of[tuple(response)]
            output = SimpleNamespace(
                token_ids=tuple(response),
                logprobs=[{token: SimpleNamespace(logprob=number)} for token, number in numbers],
                sampling_mask=SimpleNamespace(token_ids=masks)
                if self.given.get("return_sampling_mask")
                else None,
            )
            places = choice.get("prompt_logprobs", [])
            if "logprob objects" in without:
                output.logprobs, places = None, []
            prompt = [
                place and {int(token): SimpleNamespace(**it) for token, it in place.items()}
                for place in places
            ]
            return SimpleNamespace(outputs=[output], prompt_logprobs=prompt)

    package, lora, request = ModuleType("vllm"), ModuleType("vllm.lora"), ModuleType("vllm.lora.request")
    package.__version__ = "0.0.7"
    package.LLM = LLM
    fields = [(name, object, field(default=None)) for name in ARGUMENTS if name not in without]
    package.EngineArgs = make_dataclass("EngineArgs", fields)
    package.SamplingParams = make_dataclass("SamplingParams", names)
    if "LoRARequest" not in without:
        request.LoRARequest = LoRARequest
    for module in (package, lora, request):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return started
