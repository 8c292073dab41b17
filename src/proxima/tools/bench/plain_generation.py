"""Times generation alone, without training: plain `transformers` with a static cache, or vLLM;
`generation_peers.py` runs it in a process of its own. In: JSON. Out: one line of JSON.

The weights are those that the case used, without an adapter. No response ends early.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Given = dict[str, Any]  # JSON
Generate = Callable[[list[list[int]]], None]

WARM_UP = 2  # calls: the first may compile


def main(given: Given) -> Given:
    import torch

    torch.set_num_threads(given["threads"])
    version, generate = MAKERS[given["peer"]](given)
    taken = []
    for call in range(WARM_UP + given["steps"]):
        rows = prompts(given, call)
        started = time.perf_counter()
        generate(rows)
        taken.append(time.perf_counter() - started)
    timed = sorted(taken[WARM_UP:])
    return {"version": version, "generate": timed[len(timed) // 2], "warm_up": sum(taken[:WARM_UP])}


def prompts(given: Given, call: int) -> list[list[int]]:
    import torch

    size = (given["responses"], given["prompt"])
    generator = torch.Generator().manual_seed(call)
    return torch.randint(3, given["vocabulary"], size, generator=generator).tolist()


def make_transformers(given: Given) -> tuple[str, Generate]:
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = transformers.AutoModelForCausalLM.from_pretrained(given["folder"], dtype=given["dtype"])
    network.to(device).eval()
    network.generation_config.eos_token_id = None

    def generate(rows: list[list[int]]) -> None:
        ids = torch.tensor(rows, device=device)
        made = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=given["response"],
            do_sample=True,
            top_k=given["top_k"],
            top_p=given["top_p"],
            cache_implementation="static",
            pad_token_id=0,
        )
        assert made.shape[1] == given["prompt"] + given["response"]
        made.cpu()  # the work is done

    return transformers.__version__, generate


def make_vllm(given: Given) -> tuple[str, Generate]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch
    import vllm

    settings: Given = {"gpu_memory_utilization": 0.5}
    if not torch.cuda.is_available():
        cache = given["responses"] * (given["prompt"] + given["response"]) * given["cache_bytes"]
        settings = {"enforce_eager": True, "kv_cache_memory_bytes": max(64 << 20, 2 * cache)}
    engine = vllm.LLM(
        given["folder"],
        dtype=given["dtype"],
        max_model_len=given["prompt"] + given["response"],
        max_num_seqs=given["responses"],
        enable_prefix_caching=False,
        seed=0,
        **settings,
    )
    sampling = vllm.SamplingParams(
        max_tokens=given["response"],
        ignore_eos=True,
        top_k=given["top_k"] or -1,
        top_p=given["top_p"],
        detokenize=False,
    )

    def generate(rows: list[list[int]]) -> None:
        done = engine.generate([{"prompt_token_ids": row} for row in rows], sampling, use_tqdm=False)
        assert all(len(each.outputs[0].token_ids) == given["response"] for each in done)

    return vllm.__version__, generate


MAKERS = {"transformers": make_transformers, "vllm": make_vllm}


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))))
