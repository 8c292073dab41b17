"""How passes are computed: the fast path (`engine`), several processes (`distributed`), rollouts on vLLM
(`vllm`)."""
