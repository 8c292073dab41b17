"""Every metric, declared once: name, title, unit, group, meaning, what is healthy, what to do otherwise.

Report, comparison, evaluation, studio and the reference page take all of it from here. To add a metric,
declare it here and log it where it is computed. Names in backticks are settings, other metrics, commands or
pages of docs/.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One number that a run logs."""

    name: str
    """As in `metrics.jsonl`. A name that ends in `/*` declares a family: every name that begins so."""
    title: str
    """What charts and tables call it."""
    unit: str
    group: str
    """Key of one of `GROUPS`."""
    meaning: str
    healthy: str = ""
    otherwise: str = ""
    """What to do when it is not healthy."""
    chart: str = ""
    """Title of the chart that it shares with other metrics of its group; by default it has one of its own."""
    compared: bool = False
    """Whether comparisons of runs draw it without being asked to."""


@dataclass(frozen=True)
class MetricGroup:
    """Metrics that answer one question, in one section of a page."""

    title: str
    text: str


GROUPS = {
    "reward": MetricGroup(
        "Reward",
        "The score that training maximises, on the prompts of each step and on held-out prompts if there "
        "are any.",
    ),
    "policy": MetricGroup(
        "KL and entropy",
        "How far the policy has moved from the reference, and how much randomness is left in it. Some KL is "
        "needed to learn; a lot of it often means that the reward is being gamed.",
    ),
    "responses": MetricGroup(
        "Responses",
        "Length, EOS rate and repetition. A policy that games its reward usually shows it here first.",
    ),
    "update": MetricGroup(
        "Policy update",
        "A sound PPO update has ratios near 1, few clipped tokens and steady gradient norms.",
    ),
    "value": MetricGroup(
        "Value model",
        "The value model predicts the return of each token; advantages are measured against it.",
    ),
    "time": MetricGroup("Time", "How long each phase of a step takes."),
    "engine": MetricGroup(
        "Sampling engine", "How well what was sampled agrees with what is trained, and what sampling cost."
    ),
    "run": MetricGroup("Run", "Counts of failures, tokens and bytes."),
    "custom": MetricGroup(
        "Other metrics", "Metrics of your own, and names that this version does not declare."
    ),
    "finetuning": MetricGroup(
        "Fine-tuning", "What supervised fine-tuning and reward-model training measure."
    ),
}

METRICS = [
    # Reward
    Metric(
        "avg_reward",
        title="Training reward",
        unit="score",
        group="reward",
        compared=True,
        meaning="Mean score of the step's responses, before penalties, normalisation and clipping. "
        "Responses whose reward failed are left out.",
        healthy="It rises over tens of steps under the noise of each batch, and `validation/reward` rises "
        "with it.",
        otherwise="Flat: check `reward_std`, `grad_norm_policy` and `explained_variance`, then raise "
        "`learning_rate` or lower `kl_coef`. Rising while texts get worse: the reward is being gamed; raise "
        "`kl_coef` or fix the reward.",
    ),
    Metric(
        "validation/reward",
        title="Held-out reward",
        unit="score",
        group="reward",
        compared=True,
        meaning="Mean score on the validation prompts, with the same sampling noise at every evaluation.",
        healthy="It rises with `avg_reward`, then levels off.",
        otherwise="Falling while `avg_reward` rises: over-optimisation. Raise `kl_coef`, take the best "
        "checkpoint, or stop early with `patience`; `max_declining_evals` raises an alarm.",
    ),
    Metric(
        "validation/reward_low",
        title="Held-out reward, lower bound",
        unit="score",
        group="reward",
        meaning="Lower end of the 95 % bootstrap interval of `validation/reward`.",
    ),
    Metric(
        "validation/reward_high",
        title="Held-out reward, upper bound",
        unit="score",
        group="reward",
        meaning="Upper end of the 95 % bootstrap interval of `validation/reward`.",
    ),
    Metric(
        "validation/win_rate",
        title="Win rate",
        unit="fraction",
        group="reward",
        chart="Win rate against the reference",
        compared=True,
        meaning="Fraction of validation prompts on which the policy scores higher than the reference; ties "
        "count half.",
        healthy="Above 0.5, and the lower end of its interval is above 0.5 too.",
        otherwise="The interval contains 0.5: nothing is shown yet. Use more validation prompts or train "
        "longer.",
    ),
    Metric(
        "validation/win_rate_low",
        title="Win rate, lower bound",
        unit="fraction",
        group="reward",
        meaning="Lower end of the 95 % bootstrap interval of `validation/win_rate`.",
    ),
    Metric(
        "validation/win_rate_high",
        title="Win rate, upper bound",
        unit="fraction",
        group="reward",
        meaning="Upper end of the 95 % bootstrap interval of `validation/win_rate`.",
    ),
    Metric(
        "validation/win_rate/*",
        title="Win rate by judge",
        unit="fraction",
        group="reward",
        chart="Win rate against the reference",
        meaning="The win rate by the preferences of one judge.",
        healthy="It rises with `validation/win_rate`.",
        otherwise="The judge sees no gain while the reward does: the reward is being gamed; raise `kl_coef` "
        "or fix the reward (docs/evaluate.md).",
    ),
    Metric(
        "validation/win_rate_low/*",
        title="Win rate by judge, lower bound",
        unit="fraction",
        group="reward",
        meaning="Lower end of the 95 % bootstrap interval of `validation/win_rate/*`.",
    ),
    Metric(
        "validation/win_rate_high/*",
        title="Win rate by judge, upper bound",
        unit="fraction",
        group="reward",
        meaning="Upper end of the 95 % bootstrap interval of `validation/win_rate/*`.",
    ),
    Metric(
        "validation/reference_reward",
        title="Held-out reward of the reference",
        unit="score",
        group="reward",
        meaning="Mean score of the reference on the validation prompts with the same noise: where the "
        "policy started.",
        healthy="The same at every evaluation, and below `validation/reward` once something was learned.",
        otherwise="`validation/reward` stays below it: the policy got worse; lower `learning_rate`.",
    ),
    Metric(
        "reward/*",
        title="Reward",
        unit="score",
        group="reward",
        chart="Each reward by name",
        meaning="Mean score of one reward, before its weight.",
        healthy="Each moves in the intended direction, none at the expense of another.",
        otherwise="One falls while the sum rises: change the weights in `rewards`.",
    ),
    Metric(
        "validation/reward/*",
        title="Held-out reward",
        unit="score",
        group="reward",
        chart="Each held-out reward by name",
        meaning="Mean score of one reward on the validation prompts, before its weight.",
        healthy="As for `reward/*`.",
        otherwise="One falls while the sum rises: change the weights in `rewards`.",
    ),
    Metric(
        "reward_std",
        title="Standard deviation of the rewards",
        unit="score",
        group="reward",
        meaning="Standard deviation of the scores over the batch.",
        healthy="Clearly above 0: PPO learns from differences between samples.",
        otherwise="Near 0 every sample scores the same; `proxima doctor` finds this before a run. Choose a "
        "finer reward, or raise `temperature`. Above 100: set `normalize_rewards` or `clip_rewards`.",
    ),
    Metric(
        "reward_spread",
        title="Doubt of the reward model",
        unit="score",
        group="reward",
        meaning="Mean standard deviation between the heads of a reward model that is an ensemble "
        "(`ensemble`), times its weight: how far they disagree on the step's responses. Only with such a "
        "reward model.",
        healthy="It stays near its value in the first step.",
        otherwise="Growing: the policy writes what the reward model knows little about, and its scores mean "
        "less; raise the reward's option doubt_coef or `kl_coef`, or label answers of this policy.",
    ),
    # KL and entropy
    Metric(
        "kl",
        title="Sampled KL",
        unit="nats",
        group="policy",
        chart="KL to the reference",
        compared=True,
        meaning="Mean over responses of the summed per-token logprob_policy - logprob_ref: what the KL "
        "penalty acts on.",
        healthy="It starts at `truncation_cost`, rises, and levels off: at 1 to 3 nats in the demo. Longer "
        "responses have more.",
        otherwise="Growing while the validation reward does not rise: raise `kl_coef`, lower "
        "`learning_rate`, or set `kl_controller` to budget with a `kl_target`. At 0 for many steps: "
        "nothing is learned; raise `learning_rate`.",
    ),
    Metric(
        "kl_exact",
        title="KL to the reference",
        unit="nats",
        group="policy",
        chart="KL to the reference",
        meaning="Mean over responses of the summed per-token KL(untruncated policy || reference), computed "
        "over the whole vocabulary: never negative.",
        healthy="It starts at 0 and levels off. It is less noisy than `kl`, which depends on the sampled "
        "tokens.",
        otherwise="Control it with `kl_coef`. Set `kl_limit` to be warned, to stop or to roll back "
        "(`on_guard`).",
    ),
    Metric(
        "validation/kl",
        title="Held-out KL",
        unit="nats",
        group="policy",
        compared=True,
        meaning="As `kl`, on the validation prompts.",
        healthy="Near `kl`.",
        otherwise="As for `kl`: control it with `kl_coef`.",
    ),
    Metric(
        "truncation_cost",
        title="Truncation cost",
        unit="nats",
        group="policy",
        meaning="Mean over responses of the summed per-token -log(kept mass): the part of `kl` that top-k "
        "and top-p cause.",
        healthy="0 with `top_k` 0 and `top_p` 1. Otherwise small, and falling as the policy becomes more "
        "certain.",
        otherwise="Large compared with `kl`: most of the penalty pays for truncation. Raise `top_p` towards "
        "1 and set `top_k` to 0.",
    ),
    Metric(
        "kl_coef",
        title="KL coefficient",
        unit="coefficient",
        group="policy",
        meaning="KL coefficient used in this step.",
        healthy="Constant with the fixed `kl_controller`; with the adaptive one it settles where `kl` is "
        "near `kl_target`, with a budget where `kl_exact` is.",
        otherwise="Falling to 0 or growing without bound: the target cannot be met. Change `kl_target`, or "
        "the adaptive controller's speed with `kl_horizon`.",
    ),
    Metric(
        "entropy",
        title="Entropy",
        unit="nats per token",
        group="policy",
        compared=True,
        meaning="Mean per-token entropy of the sampling distribution (after truncation), at sampling time.",
        healthy="It falls and levels off above 0: from 0.34 to 0.12 on the sample data. The level depends "
        "on the model.",
        otherwise="A fast fall to 0 is collapse: every prompt gets the same text. Lower `learning_rate`, "
        "raise `kl_coef`, or set `entropy_coef`; `min_entropy` raises an alarm.",
    ),
    # Responses
    Metric(
        "response_length",
        title="Response length",
        unit="tokens",
        group="responses",
        chart="Response length",
        compared=True,
        meaning="Mean number of response tokens, EOS included.",
        healthy="It moves a little and settles below `max_new_tokens`.",
        otherwise="Growing steadily: the reward favours length. Add a length reward (`length_band`, "
        "docs/rewards.md) or raise `kl_coef`; the guard `length_limit` watches it. At `max_new_tokens`: see "
        "`eos_rate`.",
    ),
    Metric(
        "episode_turns",
        title="Turns per episode",
        unit="turns",
        group="responses",
        chart="Turns per episode",
        meaning="Mean number of the policy's turns in an episode (docs/environments.md).",
        healthy="It falls where fewer turns are enough, and stays below `max_turns`.",
        otherwise="At 1 with a low `eos_rate`: episodes are cut, because what they read does not fit. Raise "
        "`max_episode_tokens`.",
    ),
    Metric(
        "observed_tokens",
        title="Tokens read per episode",
        unit="tokens",
        group="responses",
        meaning="Mean number of tokens that an environment or tools wrote into an episode; nothing is "
        "trained on them.",
        healthy="Small compared with `max_episode_tokens`.",
        otherwise="Large: observations are most of what is computed. Shorten them.",
    ),
    Metric(
        "malformed_calls",
        title="Malformed tool calls",
        unit="calls",
        group="responses",
        meaning="Tool calls of a step that could not be read, named no tool, or raised; the policy reads the "
        "error.",
        healthy="It falls to a few.",
        otherwise="Rising: look at the samples, and at what the tool raises.",
    ),
    Metric(
        "validation/response_length",
        title="Held-out response length",
        unit="tokens",
        group="responses",
        chart="Response length",
        compared=True,
        meaning="Mean response length on the validation prompts.",
        healthy="Near `response_length`.",
        otherwise="Growing steadily: as for `response_length`.",
    ),
    Metric(
        "eos_rate",
        title="EOS rate",
        unit="fraction",
        group="responses",
        chart="EOS rate",
        compared=True,
        meaning="Fraction of responses that finished with EOS before `max_new_tokens`.",
        healthy="Near 1, or rising towards it.",
        otherwise="Low: responses are cut off. Raise `max_new_tokens`, set `missing_eos_penalty`, or "
        "fine-tune on demonstrations that finish (`proxima sft`).",
    ),
    Metric(
        "validation/eos_rate",
        title="Held-out EOS rate",
        unit="fraction",
        group="responses",
        chart="EOS rate",
        meaning="Fraction of validation responses that finished with EOS.",
        healthy="Near 1.",
        otherwise="As for `eos_rate`: `max_new_tokens`, `missing_eos_penalty`.",
    ),
    Metric(
        "validation/distinct_1",
        title="Distinct words (distinct-1)",
        unit="fraction",
        group="responses",
        chart="Distinct words and word pairs",
        meaning="Number of distinct words over the number of words, over all validation responses.",
        healthy="Steady. It falls with longer responses and with more prompts, so compare only like with "
        "like.",
        otherwise="Falling at the same length: the responses become alike. Raise `kl_coef`, or set "
        "`entropy_coef`.",
    ),
    Metric(
        "validation/distinct_2",
        title="Distinct word pairs (distinct-2)",
        unit="fraction",
        group="responses",
        chart="Distinct words and word pairs",
        compared=True,
        meaning="Number of distinct word bigrams over the number of bigrams, over all validation responses.",
        healthy="Steady, and above `validation/distinct_1`.",
        otherwise="As for `validation/distinct_1`.",
    ),
    Metric(
        "validation/repetition",
        title="Repeated 4-grams (seq-rep-4)",
        unit="fraction",
        group="responses",
        compared=True,
        meaning="Fraction of word 4-grams that occurred before in the same response, mean over the "
        "validation responses.",
        healthy="Near 0, and no higher than at the first evaluation.",
        otherwise="Rising: the policy repeats itself. Add the reward `repetition` (docs/rewards.md) or "
        "raise `kl_coef`.",
    ),
    Metric(
        "validation/common_opening",
        title="Most common opening",
        unit="fraction",
        group="responses",
        meaning="Share of the validation responses that begin with the same word, the most common one.",
        healthy="Steady.",
        otherwise="Rising with the reward: an opening that the reward likes, whatever follows it. Look at "
        "the samples, ask `judges`, and raise `kl_coef` or set `kl_controller` to budget.",
    ),
    Metric(
        "validation/copying",
        title="Copied from the prompt",
        unit="fraction",
        group="responses",
        meaning="Fraction of word 4-grams of a response that also occur in its prompt, mean over the "
        "validation responses.",
        healthy="Steady. Summaries and answers that quote have more.",
        otherwise="Rising towards 1: the policy repeats the prompt. Look at the samples; if that is not a "
        "good answer, the reward must not pay for it (`proxima doctor` can audit it); or raise `kl_coef`.",
    ),
    # Policy update
    Metric(
        "policy_loss",
        title="Policy loss",
        unit="loss",
        group="update",
        meaning="PPO-clip loss with its extra terms, mean over the optimiser steps of the update.",
        healthy="Near 0, with either sign. Its size says nothing about progress; `avg_reward` does.",
        otherwise="Large or jumping: check `approx_kl`, `ratio_max` and `clip_fraction`, and lower "
        "`learning_rate`.",
    ),
    Metric(
        "equal_groups",
        title="Fraction of equal groups",
        unit="fraction",
        group="update",
        meaning="Fraction of prompts whose responses all scored the same: with an estimator that compares "
        "them they teach nothing. Only with `num_generations` above 1.",
        healthy="Below 0.5.",
        otherwise="More: the prompts are too easy or too hard, or the reward too coarse. Raise "
        "`num_generations`, or choose other prompts.",
    ),
    Metric(
        "clip_fraction",
        title="Fraction of tokens clipped",
        unit="fraction",
        group="update",
        compared=True,
        meaning="Fraction of tokens whose gradient the `objective` stops (PPO, DIS) or caps (CISPO), mean "
        "over the optimiser steps of the update.",
        healthy="From 0 to about 0.2; 0 to 0.02 on the sample data.",
        otherwise="Above 0.3 the update goes too far: lower `learning_rate` or `ppo_epochs`. Always 0: "
        "there is room for a higher `learning_rate` or more `ppo_epochs`.",
    ),
    Metric(
        "approx_kl",
        title="Approximate KL (old to new policy)",
        unit="nats per token",
        group="update",
        meaning="Per-token KL(old || new) within the update (k3 estimate), mean over the optimiser steps.",
        healthy="Below 0.02; 0.00001 to 0.005 on the sample data.",
        otherwise="Above 0.05: lower `learning_rate` or `ppo_epochs`, or let `kl_stop` end such updates "
        "early.",
    ),
    Metric(
        "ratio_max",
        title="Largest policy ratio",
        unit="ratio",
        group="update",
        meaning="Largest ratio of new to old probability in the update.",
        healthy="Between 1 and a few; a rare token may reach 10.",
        otherwise="In the hundreds: the policy moved far on some token. Lower `learning_rate`; `dual_clip` "
        "bounds what such a token costs where its advantage is negative.",
    ),
    Metric(
        "first_ratio_error",
        title="Ratio error in the first minibatch",
        unit="ratio",
        group="update",
        meaning="Largest |ratio - 1| in the first minibatch, before any optimiser step: 0 up to rounding.",
        healthy="Below 0.001 in float32, below 0.05 in bfloat16.",
        otherwise="Larger: sampling and update disagree about the tokens' probabilities. Run `proxima "
        "doctor`, and try `engine` plain.",
    ),
    Metric(
        "grad_norm_policy",
        title="Gradient norm of the policy",
        unit="norm",
        group="update",
        meaning="Gradient norm of the policy before clipping, mean over the optimiser steps.",
        healthy="Steady, mostly below `max_grad_norm`.",
        otherwise="Always far above it, or jumping: lower `learning_rate` and check the scale of the "
        "rewards. At 0: nothing is learned; see `reward_std`.",
    ),
    Metric(
        "learning_rate",
        title="Learning rate",
        unit="learning rate",
        group="update",
        chart="Learning rates",
        meaning="Learning rate of the policy in this step.",
        healthy="As set by `learning_rate`, `warmup_steps` and `lr_schedule`.",
        otherwise="Smaller than planned by `rollback_rate_factor`: a guard rolled the run back; "
        "warnings.jsonl says why (docs/resume.md).",
    ),
    Metric(
        "value_learning_rate",
        title="Value learning rate",
        unit="learning rate",
        group="update",
        chart="Learning rates",
        meaning="Learning rate of the value model in this step.",
        healthy="As set by `value_learning_rate`, `warmup_steps` and `lr_schedule`.",
        otherwise="Smaller than planned by `rollback_rate_factor`: a guard rolled the run back; "
        "warnings.jsonl says why (docs/resume.md).",
    ),
    Metric(
        "optimizer_steps",
        title="Optimiser steps",
        unit="optimiser steps",
        group="update",
        meaning="Optimiser steps taken in the update; 0 where it was stopped before the first.",
        healthy="`ppo_epochs` times the number of minibatches, every time.",
        otherwise="Fewer: `kl_stopped` or `skipped_updates` says why, or `failed_rewards` made the batch "
        "smaller. 0 with `eos_rate` 0: `cut_responses` leaves out every response; raise `max_new_tokens`.",
    ),
    Metric(
        "skipped_updates",
        title="Skipped updates",
        unit="updates",
        group="update",
        meaning="Updates skipped because a loss or gradient was not finite. No other metric includes them.",
        healthy="0.",
        otherwise="A few in float16 are harmless. Otherwise lower `learning_rate`, or use bfloat16 or "
        "float32 (`dtype`). After `max_skipped_updates` within 10 steps the run rolls back or stops "
        "(`on_nonfinite`).",
    ),
    Metric(
        "kl_stopped",
        title="Update stopped early by kl_stop",
        unit="0 or 1",
        group="update",
        meaning="1 if kl_stop ended the update early, else 0.",
        healthy="0 at most steps, and always without `kl_stop`.",
        otherwise="1 at most steps: rollouts are hardly used. Lower `learning_rate` or `ppo_epochs`, or "
        "raise `kl_stop`.",
    ),
    # Value model
    Metric(
        "value_loss",
        title="Value loss",
        unit="loss",
        group="value",
        meaning="Value loss (squared error), mean over the optimiser steps of the update.",
        healthy="It falls in the first steps to a level set by the noise of the rewards, in their unit "
        "squared.",
        otherwise="Rising: lower `value_learning_rate` or set `value_clip`. In the hundreds: scale the "
        "rewards (`normalize_rewards`).",
    ),
    Metric(
        "explained_variance",
        title="Explained variance",
        unit="fraction",
        group="value",
        compared=True,
        meaning="1 - Var(return - value) / Var(return) before the update: 1 is perfect, 0 is no better than "
        "a constant.",
        healthy="Around 0 or below in the first steps, then rising: 0.3 after 20 steps on the sample data.",
        otherwise="Below 0 for many steps: the values do harm. Raise `value_learning_rate` (lower it where "
        "`value_loss` jumps), or start with `critic_warmup_steps`.",
    ),
    Metric(
        "value_error_position/*",
        title="Value error by position",
        unit="score per token",
        group="value",
        chart="Value error by position",
        meaning="Mean of return - value before the update, in each quarter of the responses (1 is their "
        "start). Only with a value model.",
        healthy="All near 0, compared with `reward_std`, once `explained_variance` has risen.",
        otherwise="Far from 0 at the start alone: the values do not see the score coming; raise `lam`, "
        "`value_lam` or `value_epochs`. Far everywhere: raise `value_learning_rate`.",
    ),
    Metric(
        "value_error_quantile/*",
        title="Value error by quartile",
        unit="score per token",
        group="value",
        chart="Value error by quartile of the value",
        meaning="Mean of return - value before the update, in each quartile of the tokens by value (4 has "
        "the highest values). Only with a value model.",
        healthy="All near 0, compared with `reward_std`, once `explained_variance` has risen.",
        otherwise="Below 0 at 4 and above 0 at 1: the values overfit; lower `value_epochs` or "
        "`value_learning_rate`. The reverse: they are too timid; raise one of them.",
    ),
    Metric(
        "value_mean",
        title="Mean value",
        unit="score per token",
        group="value",
        chart="Mean value and return",
        meaning="Mean per-token value before the update.",
        healthy="It follows `return_mean`, a few steps behind.",
        otherwise="Far from it for many steps: raise `value_learning_rate`, or start with "
        "`critic_warmup_steps`.",
    ),
    Metric(
        "return_mean",
        title="Mean return",
        unit="score per token",
        group="value",
        chart="Mean value and return",
        meaning="Mean per-token return: the target of the value model.",
        healthy="It rises with `avg_reward`; less, where the KL penalty grows.",
        otherwise="Falling while `avg_reward` rises: the KL penalty outweighs the gain; lower `kl_coef` or "
        "`learning_rate`.",
    ),
    Metric(
        "advantage_std",
        title="Standard deviation of the advantages",
        unit="score per token",
        group="value",
        meaning="Standard deviation of the per-token advantages before whitening.",
        healthy="Of the order of `reward_std`, and falling as the value model fits.",
        otherwise="Near 0 with `whiten_advantages`, noise is scaled up to unit variance: see `reward_std`. "
        "Rising with `value_loss`: the values are off; see `explained_variance`.",
    ),
    Metric(
        "grad_norm_value",
        title="Gradient norm of the value model",
        unit="norm",
        group="value",
        meaning="Gradient norm of the value model before clipping, mean over the optimiser steps.",
        healthy="It falls as the value model fits. Above `max_grad_norm` it is clipped, which is common in "
        "the first steps.",
        otherwise="Growing, or jumping by orders of magnitude: lower `value_learning_rate`, or scale the "
        "rewards (`normalize_rewards`).",
    ),
    # Time
    Metric(
        "seconds",
        title="Time per step",
        unit="seconds",
        group="time",
        meaning="Time of the whole step.",
        healthy="Steady after the first steps, which compile on a GPU.",
        otherwise="`proxima bench` shows what this machine can do; docs/performance.md has measurements.",
    ),
    Metric(
        "seconds/generate",
        title="Sampling time",
        unit="seconds",
        group="time",
        chart="Time per phase",
        meaning="Time spent sampling responses.",
        healthy="Steady, in proportion to the longest response.",
        otherwise="Growing: see `response_length`. Most of a step: try `engine` vllm (docs/engines.md), or "
        "lower `max_new_tokens`.",
    ),
    Metric(
        "seconds/score",
        title="Scoring time",
        unit="seconds",
        group="time",
        chart="Time per phase",
        meaning="Time spent on log-probabilities of the responses under policy and reference.",
        healthy="Well below `seconds/update`.",
        otherwise="Long: raise `micro_batch_tokens` where memory allows (docs/performance.md).",
    ),
    Metric(
        "seconds/reward",
        title="Reward time",
        unit="seconds",
        group="time",
        chart="Time per phase",
        meaning="Time spent computing rewards.",
        healthy="Below the other phases.",
        otherwise="A slow endpoint: raise its `concurrency` and `batch` (docs/rewards.md). A slow function "
        "delays every step.",
    ),
    Metric(
        "seconds/value",
        title="Value time",
        unit="seconds",
        group="time",
        chart="Time per phase",
        meaning="Time spent on values and advantages.",
        healthy="About half of `seconds/score`.",
        otherwise="Long: raise `micro_batch_tokens` where memory allows.",
    ),
    Metric(
        "seconds/update",
        title="Update time",
        unit="seconds",
        group="time",
        chart="Time per phase",
        meaning="Time spent in the update.",
        healthy="Usually the largest part: `ppo_epochs` forward and backward passes.",
        otherwise="Lower `ppo_epochs`, raise `micro_batch_tokens`, or turn off `gradient_checkpointing` "
        "where memory allows (docs/performance.md).",
    ),
    Metric(
        "seconds/*",
        title="Time",
        unit="seconds",
        group="time",
        chart="Time per phase",
        meaning="Time spent in a phase of your own trainer.",
    ),
    # Sampling engine
    Metric(
        "sampling_gap",
        title="Sampling gap",
        unit="nats per token",
        group="engine",
        meaning="Mean per-token |log-probability when sampled - log-probability in the scoring pass|: "
        "rounding of the sampling engine.",
        healthy="About 1e-7 with the built-in engine in float32, up to a few hundredths in bfloat16. It is "
        "nan where the engine reports no log-probabilities.",
        otherwise="Above 0.001 with vLLM, importance weights correct for it. The built-in engine warns "
        "above rounding: run `proxima doctor`. Growing: check `dtype` and docs/engines.md.",
    ),
    Metric(
        "outside_kept",
        title="Tokens outside the kept set",
        unit="tokens",
        group="engine",
        meaning="Sampled tokens outside the top-k and top-p set that the training side computes, for an "
        "engine that does not report its own (vLLM without sampling masks).",
        healthy="0 with the built-in engine and with vLLM's sampling masks. With vLLM otherwise a few per "
        "thousand tokens, more with `overlap`.",
        otherwise="Many: the engine does not sample as configured. Check its version and `--logprobs-mode` "
        "(docs/engines.md).",
    ),
    Metric(
        "policy_lag",
        title="Policy lag",
        unit="updates",
        group="engine",
        meaning="1 if the responses were sampled from the policy before the last update (overlap), else 0.",
        healthy="0; with `overlap` 1 from the second step on.",
        otherwise="Learning suffers from the lag: turn `overlap` off, or lower `learning_rate`.",
    ),
    Metric(
        "importance_truncated",
        title="Fraction of importance weights truncated",
        unit="fraction",
        group="engine",
        meaning="Fraction of tokens whose importance weight was truncated at `importance_clip` or, as "
        "`importance_mode` says, set to 0; 0 where no weights were needed.",
        healthy="0, or below 0.01.",
        otherwise="More: the sampled distribution is far from the trained one. Lower `learning_rate`, turn "
        "`overlap` off, or raise `importance_clip`, which adds noise.",
    ),
    Metric(
        "engine_retries",
        title="Engine retries",
        unit="responses",
        group="engine",
        meaning="Responses requested again, from another vLLM server or later from the same one.",
        healthy="0.",
        otherwise="Servers fail or are slow: read their logs, raise `engine_timeout` (docs/engines.md).",
    ),
    # Run
    Metric(
        "step",
        title="Step",
        unit="steps",
        group="run",
        meaning="PPO step, counted from 1.",
    ),
    Metric(
        "epoch",
        title="Epoch",
        unit="epochs",
        group="run",
        meaning="Pass over the prompts, counted from 1 (in `train`).",
    ),
    Metric(
        "tokens",
        title="Response tokens per step",
        unit="tokens",
        group="run",
        meaning="Number of response tokens in the step.",
    ),
    Metric(
        "failed_rewards",
        title="Failed rewards",
        unit="responses",
        group="run",
        chart="Failed rewards",
        meaning="Responses whose reward failed. They are left out of the update.",
        healthy="0.",
        otherwise="The reason is in log.txt. For an endpoint, raise its `timeout` or `retries` "
        "(docs/rewards.md); a share that grows may be a policy that hides in time-outs. Above the fraction "
        "`max_reward_failures` the run stops and saves its weights.",
    ),
    Metric(
        "failed_programs",
        title="Failed programs",
        unit="responses",
        group="run",
        chart="Failed rewards",
        meaning="Responses whose program (the reward named code) hung, crashed, ran out of memory or could "
        "not be started. They score 0 and are trained on; those that only fail a test are not counted.",
        healthy="A few, and falling.",
        otherwise="Most of them: log.txt says how they ended. If `proxima doctor` has complaints about the "
        "workers, the sandbox is what fails; otherwise raise the reward's timeout or memory_mb.",
    ),
    Metric(
        "validation/failed_rewards",
        title="Held-out failed rewards",
        unit="responses",
        group="run",
        chart="Failed rewards",
        meaning="Validation responses whose reward failed. They are left out of the evaluation.",
        healthy="0.",
        otherwise="As for `failed_rewards`; above the fraction `max_reward_failures` there is no evaluation.",
    ),
    Metric(
        "validation/unjudged/*",
        title="Prompts not judged",
        unit="prompts",
        group="run",
        chart="Prompts not judged",
        meaning="Validation prompts that one judge could not judge. They are left out of its win rate.",
        healthy="0.",
        otherwise="The judge fails; the reason is in log.txt (docs/evaluate.md).",
    ),
    Metric(
        "truncated_prompts",
        title="Truncated prompts",
        unit="prompts",
        group="run",
        meaning="Prompts cut on the left to fit the context.",
        healthy="0.",
        otherwise="The model does not see how they begin. Shorten the prompts or lower `max_new_tokens`; "
        "without `truncate_prompts` they are refused.",
    ),
    Metric(
        "alarms",
        title="Alarms",
        unit="guards",
        group="run",
        meaning="Number of guards that raise an alarm at this step; warnings.jsonl names them (in `train`).",
        healthy="0.",
        otherwise="Read warnings.jsonl. docs/resume.md lists each guard and its setting; `on_guard` says "
        "what the run does.",
    ),
    Metric(
        "buffer_bytes",
        title="Experience buffer",
        unit="bytes",
        group="run",
        meaning="Bytes that the experience buffer held in memory.",
        healthy="Far below `buffer_max_bytes`.",
        otherwise="Near it: move the buffer with `buffer_storage` or `buffer_overflow`, or lower "
        "`batch_size`.",
    ),
    # Other metrics
    Metric(
        "custom/*",
        title="Custom",
        unit="",
        group="custom",
        meaning="A metric of your own, logged without a declaration.",
    ),
    Metric(
        "validation/custom/*",
        title="Held-out custom",
        unit="",
        group="custom",
        meaning="A metric of your own on the validation prompts, logged without a declaration.",
    ),
]

FINETUNING_METRICS = [
    Metric(
        "step",
        title="Step",
        unit="optimiser steps",
        group="finetuning",
        meaning="Optimiser step, counted from 1.",
    ),
    Metric(
        "epoch",
        title="Epoch",
        unit="epochs",
        group="finetuning",
        meaning="Pass over the data, counted from 1.",
    ),
    Metric(
        "train_loss",
        title="Training loss",
        unit="loss",
        group="finetuning",
        meaning="Mean loss of the optimiser steps since the last evaluation: per-token cross-entropy (sft), "
        "-log sigmoid of the margin (preferences), or squared error of the standardised rating (ratings).",
        healthy="It falls. Random guessing has 0.69 on preferences; predicting the mean has 1 on ratings.",
        otherwise="Flat: raise `learning_rate`, check the data (`proxima data check`). Jumping: lower it, "
        "or raise `batch_size`.",
    ),
    Metric(
        "validation_loss",
        title="Validation loss",
        unit="loss",
        group="finetuning",
        meaning="The same loss on held-out examples.",
        healthy="It falls with `train_loss`, then levels off.",
        otherwise="Rising while `train_loss` falls: overfitting. Use fewer `epochs`, a lower "
        "`learning_rate`, `weight_decay`, or more data; `patience` stops early.",
    ),
    Metric(
        "accuracy",
        title="Accuracy on held-out pairs",
        unit="fraction",
        group="finetuning",
        meaning="Fraction of held-out pairs that the scores put in the order that people gave (reward "
        "training).",
        healthy="Above 0.6, and higher the more people agree with each other; the demo's model has 0.84.",
        otherwise="Below 0.55 it is hardly better than chance, and PPO warns: use more or cleaner "
        "preferences, or a lower `learning_rate`.",
    ),
    Metric(
        "calibration_error",
        title="Expected calibration error",
        unit="fraction",
        group="finetuning",
        meaning="Mean difference between the reward model's confidence and its accuracy, over ten bins "
        "(preferences).",
        healthy="Below 0.1.",
        otherwise="Larger with a good `accuracy`: the scores are over- or underconfident. Use fewer "
        "`epochs`, or `weight_decay`.",
    ),
    Metric(
        "margin",
        title="Score margin",
        unit="score",
        group="finetuning",
        meaning="Mean score of the chosen response minus that of the rejected one, held out (preferences).",
        healthy="Above 0 and growing to a few units.",
        otherwise="Very large: the scores are overconfident; see `calibration_error`.",
    ),
    Metric(
        "skipped_updates",
        title="Skipped updates",
        unit="updates",
        group="finetuning",
        meaning="Updates so far that were skipped because a gradient was not finite; logged once there is "
        "one.",
        healthy="None.",
        otherwise="Lower `learning_rate`, or set `dtype` to float32. After 10 of them training stops.",
    ),
]
