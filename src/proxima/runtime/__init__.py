"""How models are run: the fast path (`engine`), several processes (`distributed`), vLLM (`vllm`)."""
