"""Every logged number, defined once. In: a metric's name. Out: what it is, what healthy looks like, what to
do when it is not.

Nothing heavy is imported here: reports, the studio and the reference pages all read it. Names in backticks
are settings, other metrics, commands or pages of docs/.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One number that a run logs."""

    meaning: str
    healthy: str = ""
    otherwise: str = ""


INTERVAL = "Lower end of its 95 % bootstrap interval.", "Upper end of it."

REWARD = {
    "avg_reward": Metric(
        "Mean score of the step's sequences, before penalties, normalisation and clipping; failed ones left "
        "out.",
        "It rises over tens of steps under the noise of each batch; `validation/reward` rises with it.",
        "Flat: see `reward_std`, `grad_norm_policy` and `explained_variance`, then raise `learning_rate` or "
        "lower `kl_coef`. "
        "Rising while texts get worse: the reward is gamed; raise `kl_coef` or mend the reward.",
    ),
    "reward_std": Metric(
        "Standard deviation of these scores over the batch.",
        "Clearly above 0: samples that differ are what there is to learn from.",
        "Near 0 every sample scores the same; `proxima doctor` finds this before a run. Choose a finer "
        "reward, or raise "
        "`temperature`. Above 100: set `normalize_rewards` or `clip_rewards`.",
    ),
    "reward/*": Metric(
        "Mean score of one reward by its name, before its weight.",
        "Each goes the way it should, none at the cost of another.",
        "One falls while the sum rises: change the weights in `rewards`.",
    ),
    "failed_rewards": Metric(
        "Sequences whose reward failed; they were left out of the update.",
        "0.",
        "The reason is in log.txt. An endpoint: raise its `timeout` or `retries` (docs/rewards.md). Above "
        "`max_reward_failures` of a step the run stops, weights saved.",
    ),
}

DISTANCE = {
    "kl": Metric(
        "Mean over sequences of the summed per-token logprob_policy - logprob_ref (nats): what the penalty "
        "acts on.",
        "It starts at `truncation_cost`, rises, and levels off: 1 to 3 nats in the demo. Longer texts have "
        "more.",
        "Growing without the validation reward rising: raise `kl_coef`, lower `learning_rate`, or set "
        "`kl_controller` to "
        "adaptive with a `kl_target`. At 0 for many steps: nothing is learned; raise `learning_rate`.",
    ),
    "kl_exact": Metric(
        "Mean over sequences of the summed exact KL(untruncated policy || reference) (nats): never negative.",
        "It starts at 0 and levels off; calmer than `kl`, since whole distributions are compared.",
        "Set `kl_limit` to be warned, to stop or to go back (`on_guard`); hold it with `kl_coef`.",
    ),
    "truncation_cost": Metric(
        "Mean over sequences of the summed -log(kept mass) (nats): the part of `kl` that top-k and top-p "
        "cause.",
        "0 with `top_k` 0 and `top_p` 1; else small and falling as the policy gets surer.",
        "Large beside `kl`: the penalty is mostly paid for truncation. Raise `top_p` towards 1 and set "
        "`top_k` to 0.",
    ),
    "kl_coef": Metric(
        "KL coefficient used in this step.",
        "Constant with the fixed `kl_controller`; with the adaptive one it settles where `kl` is near "
        "`kl_target`.",
        "Running to 0 or without bound: the target cannot be met; change `kl_target`, or the speed by "
        "`kl_horizon`.",
    ),
    "entropy": Metric(
        "Mean entropy of the acting (truncated) policy a token (nats), at sampling time.",
        "It falls and levels off above 0: from 0.34 to 0.12 on the sample data. The level depends on the "
        "model.",
        "A fast fall to 0 is collapse: every prompt gets the same text. Lower `learning_rate`, raise "
        "`kl_coef`, or set "
        "`entropy_coef`; `min_entropy` raises an alarm.",
    ),
}

TEXTS = {
    "response_length": Metric(
        "Mean number of response tokens, EOS included.",
        "It moves a little and settles below `max_new_tokens`.",
        "Growing step by step: the reward likes length. Weigh it (`length_band`, docs/rewards.md), raise "
        "`kl_coef`; the guard "
        "`length_limit` watches it. At `max_new_tokens`: see `eos_rate`.",
    ),
    "eos_rate": Metric(
        "Share of responses that ended by themselves.",
        "Near 1, or rising towards it.",
        "Low: responses are cut. Raise `max_new_tokens`, set `missing_eos_penalty`, or fine-tune on "
        "demonstrations that end "
        "(`proxima sft`).",
    ),
    "truncated_prompts": Metric(
        "Prompts cut on the left to fit the context.",
        "0.",
        "The model does not see their beginning. Shorten the prompts or lower `max_new_tokens`; without "
        "`truncate_prompts` "
        "they are refused.",
    ),
    "tokens": Metric("Response tokens of the step."),
}

VALUE = {
    "value_mean": Metric(
        "Mean value a token before the update.",
        "It follows `return_mean`, a few steps behind.",
        "Far from it for many steps: raise `value_learning_rate`, or begin with `critic_warmup_steps`.",
    ),
    "return_mean": Metric(
        "Mean value target a token.",
        "It rises with `avg_reward`; less, where the KL penalty grows.",
        "Falling while `avg_reward` rises: the KL penalty eats the gain; lower `kl_coef` or `learning_rate`.",
    ),
    "explained_variance": Metric(
        "1 - Var(return - value) / Var(return) before the update: 1 perfect, 0 no better than a constant.",
        "Around 0 or below in the first steps, then rising: 0.3 after 20 steps on the sample data.",
        "Below 0 for many steps: the values do harm. Raise `value_learning_rate` (lower it where "
        "`value_loss` jumps), or start "
        "with `critic_warmup_steps`.",
    ),
    "value_loss": Metric(
        "Value loss (squared error), mean over the update's optimiser steps.",
        "It falls in the first steps to a level set by the noise of the rewards, in their unit squared.",
        "Rising: lower `value_learning_rate` or set `value_clip`. In the hundreds: scale the rewards "
        "(`normalize_rewards`).",
    ),
    "grad_norm_value": Metric(
        "Gradient norm of the value model before clipping, mean over optimiser steps.",
        "It falls as the values fit; above `max_grad_norm` it is clipped, which is common in the first "
        "steps.",
        "Growing, or jumping by orders: lower `value_learning_rate`, scale the rewards "
        "(`normalize_rewards`).",
    ),
    "value_learning_rate": Metric(
        "Value learning rate of the step.",
        "As `value_learning_rate`, `warmup_steps` and `lr_schedule` say.",
        "Smaller by `rollback_rate_factor` than planned: a guard went back; warnings.jsonl says why "
        "(docs/resume.md).",
    ),
    "advantage_std": Metric(
        "Standard deviation of the advantages a token before whitening.",
        "Of the order of `reward_std`, and falling as the values fit.",
        "Near 0 with `whiten_advantages` on, noise is blown up to full size: see `reward_std`. Rising with "
        "`value_loss`: the "
        "values are off; see `explained_variance`.",
    ),
}

UPDATE = {
    "policy_loss": Metric(
        "PPO-clip loss with its extra terms, mean over the update's optimiser steps.",
        "Near 0, of either sign: its size says nothing about progress, `avg_reward` does.",
        "Large or jumping: look at `approx_kl`, `ratio_max` and `clip_fraction`, and lower `learning_rate`.",
    ),
    "clip_fraction": Metric(
        "Share of tokens whose gradient clipping stopped, mean over the update's optimiser steps.",
        "From 0 to about 0.2; 0 to 0.02 on the sample data.",
        "Above 0.3 the update reaches too far: lower `learning_rate` or `ppo_epochs`. Always 0: there is "
        "room for a higher "
        "`learning_rate` or more `ppo_epochs`.",
    ),
    "approx_kl": Metric(
        "KL(old || new) a token inside the update (k3 estimate), mean over the update's optimiser steps.",
        "Below 0.02; 0.00001 to 0.005 on the sample data.",
        "Above 0.05: lower `learning_rate` or `ppo_epochs`, or let `kl_stop` end such updates early.",
    ),
    "ratio_max": Metric(
        "Largest policy ratio of the update.",
        "Between 1 and a few; one rare token may reach 10.",
        "In the hundreds: the policy moved far on some token. Lower `learning_rate`; `dual_clip` bounds "
        "what such a token "
        "costs where its advantage is negative.",
    ),
    "first_ratio_error": Metric(
        "Largest |ratio - 1| in the first minibatch, before any optimiser step: 0 up to rounding.",
        "Below 0.001 in float32, below 0.05 in bfloat16.",
        "Larger: sampling and update disagree about what was sampled. Run `proxima doctor`, and try "
        "`engine` plain.",
    ),
    "grad_norm_policy": Metric(
        "Gradient norm of the policy before clipping, mean over optimiser steps.",
        "Steady, mostly below `max_grad_norm`.",
        "Always far above it, or jumping: lower `learning_rate`, look at the rewards' scale. At 0: nothing "
        "is learned; see "
        "`reward_std`.",
    ),
    "learning_rate": Metric(
        "Policy learning rate of the step.",
        "As `learning_rate`, `warmup_steps` and `lr_schedule` say.",
        "Smaller by `rollback_rate_factor` than planned: a guard went back; warnings.jsonl says why "
        "(docs/resume.md).",
    ),
    "optimizer_steps": Metric(
        "Optimiser steps taken (0 where a stop came first).",
        "`ppo_epochs` times the minibatches of a step, every time.",
        "Fewer: `kl_stopped` or `skipped_updates` says why, or `failed_rewards` made the step smaller.",
    ),
    "skipped_updates": Metric(
        "Updates skipped because a loss or gradient was not finite; no other number counts them in.",
        "0.",
        "A few in float16 may pass. Else lower `learning_rate`, use bfloat16 or float32 (`dtype`). After "
        "`max_skipped_updates` "
        "within 10 steps the run goes back or stops (`on_nonfinite`).",
    ),
    "kl_stopped": Metric(
        "1 if kl_stop ended the update early, else 0.",
        "0 at most steps, and always without `kl_stop`.",
        "1 at most steps: rollouts are hardly used. Lower `learning_rate` or `ppo_epochs`, or raise "
        "`kl_stop`.",
    ),
}

ENGINE = {
    "sampling_gap": Metric(
        "Mean |log-probability when sampled - in the scoring pass| a token: how the engine that samples "
        "rounds.",
        "About 1e-7 with the built-in engine in float32, up to a few hundredths in bfloat16. nan: the "
        "engine did not say.",
        "Above 0.001 with vLLM importance weights correct it. More than rounding with the built-in engine "
        "is warned of: run "
        "`proxima doctor`. Growing: look at `dtype` and docs/engines.md.",
    ),
    "outside_kept": Metric(
        "Tokens outside the kept set that the training side computed for an engine that names none (vLLM).",
        "0 with the built-in engine; with vLLM a few in a thousand tokens, more with `overlap`.",
        "Many: the engine does not sample as the settings say. Check its version and `--logprobs-mode` "
        "(docs/engines.md).",
    ),
    "policy_lag": Metric(
        "1 if the step's responses were sampled from the policy before the last update (overlap), else 0.",
        "0; with `overlap` 1 from the second step on.",
        "Learning suffers from the lag: turn `overlap` off, or lower `learning_rate`.",
    ),
    "importance_truncated": Metric(
        "Share of tokens whose importance weight was cut at importance_clip; 0 where none was needed.",
        "0, or below 0.01.",
        "More: what was sampled is far from what is trained. Lower `learning_rate`, turn `overlap` off, or "
        "raise "
        "`importance_clip`, which adds noise.",
    ),
    "engine_retries": Metric(
        "Responses that another vLLM server, or the same one later, was asked for again.",
        "0.",
        "Servers fail or are slow: read their logs, raise `engine_timeout` (docs/engines.md).",
    ),
}

RUN = {
    "step": Metric("PPO step, counted from 1."),
    "epoch": Metric("Pass over the prompts, counted from 1 (in `train`)."),
    "alarms": Metric(
        "Guards that raise an alarm at this step; warnings.jsonl names them (in `train`).",
        "0.",
        "Read warnings.jsonl; docs/resume.md has each guard and its setting, `on_guard` says what is done.",
    ),
    "buffer_bytes": Metric(
        "Bytes the experience buffer held in memory.",
        "Far below `buffer_max_bytes`.",
        "Near it: move the buffer with `buffer_storage` or `buffer_overflow`, or lower `batch_size`.",
    ),
    "seconds/generate": Metric(
        "Time of sampling.",
        "Steady, in proportion to the longest response.",
        "Growing: see `response_length`. Most of a step: try `engine` vllm (docs/engines.md), or lower "
        "`max_new_tokens`.",
    ),
    "seconds/score": Metric(
        "Time of scoring the samples with policy and reference.",
        "Well below `seconds/update`.",
        "Long: raise `micro_batch_tokens` where memory allows (docs/performance.md).",
    ),
    "seconds/reward": Metric(
        "Time of the rewards.",
        "Below the other stages.",
        "A slow endpoint: raise its `concurrency` and `batch` (docs/rewards.md). A slow function holds "
        "every step.",
    ),
    "seconds/value": Metric(
        "Time of values and advantages.",
        "About half of `seconds/score`.",
        "Long: raise `micro_batch_tokens` where memory allows.",
    ),
    "seconds/update": Metric(
        "Time of the update.",
        "Mostly the largest part: `ppo_epochs` passes forward and backward.",
        "Fewer `ppo_epochs`, larger `micro_batch_tokens`, no `gradient_checkpointing` where memory allows "
        "(docs/performance.md).",
    ),
    "seconds": Metric(
        "Time of the whole step.",
        "Steady after the first steps, which compile on a GPU.",
        "`proxima bench` shows what this machine can do; docs/performance.md what was measured.",
    ),
}

VALIDATION = {
    "validation/reward": Metric(
        "Mean score on the validation prompts, with the same sampling noise at every evaluation.",
        "It rises with `avg_reward`, then levels off.",
        "Falling while `avg_reward` rises: over-optimisation. Raise `kl_coef`, take the best checkpoint, "
        "stop by `patience`; "
        "`max_declining_evals` raises an alarm.",
    ),
    "validation/reward_low": Metric("Lower end of the 95 % bootstrap interval of `validation/reward`."),
    "validation/reward_high": Metric("Upper end of it."),
    "validation/reference_reward": Metric(
        "The score of the reference on the same prompts with the same noise: where the policy began.",
        "The same at every evaluation, and below `validation/reward` once something was learned.",
        "`validation/reward` stays below it: the policy got worse; lower `learning_rate`.",
    ),
    "validation/reward/*": Metric(
        "Mean score of one reward by its name on the validation prompts, before its weight.",
        "As `reward/*`.",
        "One falls while the sum rises: change the weights in `rewards`.",
    ),
    "validation/failed_rewards": Metric(
        "Validation answers whose reward failed; they were left out.",
        "0.",
        "As for `failed_rewards`; above `max_reward_failures` of them there is no evaluation.",
    ),
    "validation/win_rate": Metric(
        "Share of validation prompts on which the policy's score beats the reference's (0.5: a tie).",
        "Above 0.5 with the lower end of its interval above 0.5 too.",
        "The interval holds 0.5: nothing is shown yet; give more validation prompts or train longer.",
    ),
    "validation/win_rate_low": Metric(INTERVAL[0]),
    "validation/win_rate_high": Metric(INTERVAL[1]),
    "validation/win_rate/*": Metric(
        "The same by the preference of a judge, by its name.",
        "It rises with `validation/win_rate`.",
        "The judge sees no gain while the reward does: the reward is gamed; raise `kl_coef` or mend it "
        "(docs/evaluate.md).",
    ),
    "validation/win_rate_low/*": Metric(INTERVAL[0]),
    "validation/win_rate_high/*": Metric(INTERVAL[1]),
    "validation/unjudged/*": Metric(
        "Validation prompts that a judge, by its name, could not judge; they were left out.",
        "0.",
        "The judge fails; the reason is in log.txt (docs/evaluate.md).",
    ),
    "validation/kl": Metric(
        "Sequence KL on the validation prompts, as `kl`.",
        "Near `kl`.",
        "As for `kl`: hold it with `kl_coef`.",
    ),
    "validation/response_length": Metric(
        "Mean response length on the validation prompts.",
        "Near `response_length`.",
        "Growing step by step: as for `response_length`.",
    ),
    "validation/eos_rate": Metric(
        "Share of validation responses that ended by themselves.",
        "Near 1.",
        "As for `eos_rate`: `max_new_tokens`, `missing_eos_penalty`.",
    ),
    "validation/distinct_1": Metric(
        "Different words over all words of the validation answers.",
        "Steady. It falls as answers get longer or more prompts are asked, so compare only like with like.",
        "Falling at the same length: the answers become one answer. Raise `kl_coef`, or set `entropy_coef`.",
    ),
    "validation/distinct_2": Metric(
        "Different pairs of neighbouring words over all such pairs of the validation answers.",
        "Steady, above `validation/distinct_1`.",
        "As for `validation/distinct_1`.",
    ),
    "validation/repetition": Metric(
        "Share of four-word runs that came before in the same answer, mean over the validation answers.",
        "Near 0, and no higher than at the first evaluation.",
        "Rising: the policy repeats itself. Add the reward `repetition` (docs/rewards.md) or raise "
        "`kl_coef`.",
    ),
}

GROUPS: dict[str, dict[str, Metric]] = {
    "Reward": REWARD,
    "Distance from the reference": DISTANCE,
    "Texts": TEXTS,
    "The value model": VALUE,
    "The update of the policy": UPDATE,
    "The engine that samples": ENGINE,
    "The run": RUN,
    "Evaluations on held-out prompts": VALIDATION,
}

GLOSSARY: dict[str, Metric] = {name: metric for group in GROUPS.values() for name, metric in group.items()}
"""What a PPO step logs, and a test holds that it is the same names; `reward/*` stands for every name that
begins so."""

STAGES: dict[str, Metric] = {
    "step": Metric("Optimiser step, counted from 1."),
    "epoch": Metric("Pass over the data, counted from 1."),
    "train_loss": Metric(
        "Mean loss of the optimiser steps since the last measurement: cross-entropy a token (sft), -log "
        "sigmoid of the margin "
        "(preferences), squared error of the standardised rating (ratings).",
        "It falls. A coin would have 0.69 on preferences; guessing the mean has 1 on ratings.",
        "Flat: raise `learning_rate`, look at the data (`proxima data check`). Jumping: lower it, raise "
        "`batch_size`.",
    ),
    "validation_loss": Metric(
        "The same loss on held-out examples; the weights of the measurement with the lowest are kept.",
        "It falls with `train_loss`, then levels off.",
        "Rising while `train_loss` falls: overfitting. Fewer `epochs`, a lower `learning_rate`, "
        "`weight_decay`, or more data; "
        "`patience` stops early.",
    ),
    "accuracy": Metric(
        "Share of held-out pairs that the scores put in the order people gave (reward training).",
        "Above 0.6, and higher the more people agree among themselves; the demo's model has 0.83.",
        "Below 0.55 it is hardly better than a coin, and PPO warns: more or cleaner preferences, a lower "
        "`learning_rate`.",
    ),
    "calibration_error": Metric(
        "Mean difference between how sure the reward model is and how often it is right, over ten bins "
        "(preferences).",
        "Below 0.1.",
        "Larger with a good `accuracy`: scores are too far apart or too near. Fewer `epochs`, or "
        "`weight_decay`.",
    ),
    "margin": Metric(
        "Mean score of the chosen answer minus that of the rejected one, held out (preferences).",
        "Above 0 and growing to a few units.",
        "Very large: the scores are too sure; see `calibration_error`.",
    ),
}
"""What `proxima sft` and `proxima reward` measure every `eval_every` optimiser steps."""


def is_defined(name: str) -> bool:
    return explain(name) is not None


def explain(name: str) -> Metric | None:
    """`validation/reward/x` reads as `validation/reward/*`; None for a measure of one's own."""
    parts = name.split("/")
    families = ["/".join(parts[:end]) + "/*" for end in range(len(parts) - 1, 0, -1)]
    return next((GLOSSARY[key] for key in (name, *families) if key in GLOSSARY), None)


def plain(text: str) -> str:
    """For pages that show text as it is."""
    return text.replace("`", "")
