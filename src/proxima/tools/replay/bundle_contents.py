"""What a bundle holds, and a copy of it without texts. In: a bundle. Out: lines for whoever is about to share
it; a bundle that holds numbers alone.

Token ids are text in another form, since anyone with the tokenizer can read them; so a redacted bundle holds
none, nor the weights and kept sets, which serve only together with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath

from proxima.config import shareable
from proxima.core.json_record import Record, within
from proxima.core.terminal_text import visible
from proxima.runs import Bundle

WITHOUT_TEXT = (
    "tokens/mask",
    "tokens/observed",
    "tokens/ended",
    "tokens/truncated",
    "tokens/sampled_logprobs",
)
KINDS = {"rewards": "reward", "judges": "judge", "environment": "environment", "tools": "tool"}
"""Settings that name code, servers or models, and what one of them is called in a redacted bundle."""
OWN_WORDS = {"value_model": ("adapter", "policy"), "sft_adapter": ("",)}
"""Settings that hold a folder, and what else they may say."""
PATHS = ("model_name", "sft_adapter", "value_model", "run_dir", "run_name")
SHOWN = 60  # characters of the longest prompt that is shown


def redacted(bundle: Bundle) -> Bundle:
    """The same step without prompts, responses, token ids, weights, paths and names of rewards, which may say
    where a reward is or what it is for."""
    groups = ("tokens/", "before/", "after/", "reference/")
    tensors = {
        name: each
        for name, each in bundle.tensors.items()
        if name in WITHOUT_TEXT or not name.startswith(groups)
    }
    facts = bundle.facts
    rewards = {str(name): f"reward {place}" for place, name in enumerate(facts["reward_names"], 1)}
    judges = {_label(each): f"judge {place}" for place, each in enumerate(_specs(facts, "judges"), 1)}
    return replace(
        bundle,
        tensors=tensors,
        facts={
            **facts,
            "redacted": True,
            "prompts": [],
            "tokens": [],
            "adapters": {},
            "base": {**facts["base"], "name": _last_part(str(facts["base"].get("name", "")))},
            "settings": _without_paths(facts),
            "reward_names": [f"reward {place}" for place in range(1, len(facts["reward_names"]) + 1)],
            "metrics": {_metric(name, rewards): value for name, value in facts["metrics"].items()},
            "episodes": [
                {**each, "failure": each["failure"] and "failed"} for each in facts.get("episodes", [])
            ],
            "state": _with_names(facts["state"], rewards, judges),
        },
    )


def _without_paths(facts: Record) -> Record:
    """Settings without folders and names of runs, with the last part of the model's name, and with rewards by
    number and weight alone."""
    settings = within(facts, "settings")
    named: Record = dict.fromkeys({"run_dir", "run_name"} & settings.keys(), "")
    for name, words in OWN_WORDS.items():
        if name in settings:
            named[name] = settings[name] if settings[name] in words else "a folder"
    if "model_name" in settings:
        named["model_name"] = _last_part(str(settings["model_name"]))
    for name in KINDS.keys() & settings.keys():
        kind = KINDS[name]
        named[name] = [
            {"source": f"{kind} {place}", "weight": spec.get("weight", 1.0)}
            for place, spec in enumerate(_specs(facts, name), 1)
        ]
    return {**settings, **named, "engine_urls": []}


def _specs(facts: Record, name: str) -> list[Record]:
    """Rewards or judges of the settings."""
    given = within(facts, "settings").get(name)
    return [spec for spec in given if isinstance(spec, dict)] if isinstance(given, list) else []


def _label(spec: Record) -> str:
    return str(spec.get("name", spec.get("source")))


def _metric(name: str, rewards: Mapping[str, str]) -> str:
    """`reward/NAME` by number."""
    own = name.removeprefix("reward/")
    return f"reward/{rewards[own]}" if own != name and own in rewards else name


def _with_names(state: Record, rewards: Mapping[str, str], judges: Mapping[str, str]) -> Record:
    """What a step began with: units and endings of rewards under other names."""

    def renamed(value: object, names: Mapping[str, str]) -> Record:
        return (
            {names[key]: each for key, each in value.items() if key in names}
            if isinstance(value, dict)
            else {}
        )

    endings = within(state, "endings")
    both = {}
    for kind, names in (("rewards", rewards), ("judges", judges)):
        found = renamed(endings.get(kind), names)
        both[kind] = {name: _without_source(each) for name, each in found.items()}
    return {**state, "units": renamed(state.get("units"), rewards), "endings": both}


def _without_source(ending: object) -> Record:
    """How texts end for a classifier, without its folder or id."""
    known = ending if isinstance(ending, dict) else {}
    return {name: known[name] for name in ("how", "is_guess") if name in known}


def _last_part(path: str) -> str:
    return PurePath(path).name if path else ""


def contents(bundle: Bundle) -> list[str]:
    """What is inside, line by line."""
    facts, base = bundle.facts, bundle.facts["base"]
    count = len(bundle.tensors["tokens/mask"])
    lines = [
        f"step {bundle.step} of {count} sequences, recorded by proxima {facts['proxima']} on "
        f"{facts['device']} in {facts['dtype']}",
        f"base model {base.get('name')} (not inside; its weights have the SHA-256 {base.get('sha256')})",
    ]
    if facts["reason"]:
        lines.append(f"recorded because of an alarm or an error: {facts['reason']}")
    sizes: dict[str, int] = {}
    for name, tensor in bundle.tensors.items():
        group = name.split("/")[0]
        sizes[group] = sizes.get(group, 0) + tensor.numel() * tensor.element_size()
    lines += [f"  {group:<14}{size:>14,} bytes" for group, size in sorted(sizes.items())]
    if bundle.is_redacted:
        lines.append("no prompts, no responses, no token ids, no weights: it is redacted")
        lines.append(
            "numbers of each token, its log-probabilities among them: who has the base model and guesses a "
            "text can check the guess"
        )
    else:
        longest = max((str(each["text"]) for each in facts["prompts"]), key=len)
        columns = sorted({name for each in facts["prompts"] for name in within(each, "columns")})
        lines += [
            f"{count} prompts in full, for example {longest[:SHOWN]!r}"
            + (f", with their columns {', '.join(columns)}" if columns else ""),
            f"{count} responses in full, as texts and as token ids",
            "trained adapters and their optimiser, from which training data may be guessed",
        ]
    settings = facts["settings"]
    paths = [str(settings[name]) for name in PATHS if "/" in str(settings.get(name, ""))]
    lines.append("all settings, keys removed" + (f"; paths: {', '.join(paths)}" if paths else ""))
    lines.append(
        f"versions and hardware: {facts['environment'].get('system')}, {facts['environment'].get('cpu')}"
    )
    return [visible(shareable(line)) for line in lines]
