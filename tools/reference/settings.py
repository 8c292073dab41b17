"""One page per setting, and their index. In: the configs' declarations and readers. Out: Markdown by name."""

from __future__ import annotations

import re
from typing import Any

import yaml

from proxima.cli.commands import COMMANDS
from proxima.config import PPOConfig, RewardConfig
from proxima.runs.glossary import FINETUNING, GLOSSARY, Metric
from tools.reference.source import (
    CONFIGS,
    Field,
    anchor,
    configs_of,
    fields_of,
    guides_with,
    linked,
    listed,
    readers,
    table,
)

UP = "../../"
FIRST = "the essentials"
ONLY_FINETUNING = "only in fine-tuning"
SECTIONS = {
    FIRST: "Model, adapters, learning rates, sampling and PPO's own numbers: what most runs change.",
    "models": "What is loaded, where, and where the reward comes from.",
    "prompts and rewards": "What is done with prompts that are too long and with scores before PPO sees "
    "them.",
    "the update": "How a rollout becomes new weights, by which engine, within which memory.",
    "the buffer": "Where a rollout waits and how minibatches are drawn from it.",
    "the run": "Evaluations, checkpoints, folders, trackers.",
    "guards": "When a run counts as going wrong, and what is done then.",
    ONLY_FINETUNING: "`proxima sft` and `proxima reward` know these beside those above that name them.",
}
EXAMPLES: dict[str, dict[str, Any]] = {
    "environment": {"environment": ["my_game:Game"]},
    "tools": {"tools": ["my_tools:add"]},
    "discount": {"environment": ["my_game:Game"], "discount": "turn"},
    "sft_adapter": {"sft_adapter": "runs/sft"},
    "rewards": {
        "rewards": [
            "runs/reward",
            {"source": "length_band", "weight": 0.5, "options": {"low": 5, "high": 40}},
        ]
    },
    "judges": {"judges": ["my_judges:shorter"]},
    "engine_urls": {"engine": "vllm", "engine_urls": ["http://gpu1:8000", "http://gpu2:8000"]},
    "overlap": {"engine": "vllm", "engine_urls": ["http://gpu1:8000"], "overlap": True},
    "run_name": {"run_name": "first"},
    "trackers": {"trackers": ["tensorboard"]},
}
"""Lines for settings whose default is nothing."""


def setting_pages() -> dict[str, str]:
    names = list(dict.fromkeys(name for kind in CONFIGS.values() for name in fields_of(kind)))
    return {"index": index(names), **{name: page(name) for name in names}}


def index(names: list[str]) -> str:
    ppo, finetuning, rewarding = map(fields_of, CONFIGS.values())
    parts = [
        "# Settings",
        f"The {len(ppo)} settings of a PPO run (`PPOConfig`: {_commands('ppo')}) and the "
        f"{len(finetuning)} of fine-tuning before it (`FinetuningConfig`: "
        f"{_commands('finetuning')}; `RewardConfig`, which adds {len(rewarding) - len(finetuning)}: "
        f"{_commands('reward_training')}). Each can be given as a flag (`--kl-coef 0.05`), in a file "
        "(`--config run.yaml`, with lines such as `kl_coef: 0.05`; flags win) or in Python "
        "(`PPOConfig(kl_coef=0.05)`). A "
        "value of a wrong type or out of range is refused before anything is loaded; so is a name that is "
        "not known, with "
        "the nearest one that is.",
    ]
    for section, text in SECTIONS.items():
        fields = [ppo.get(name) or rewarding[name] for name in names if _section(name) == section]
        rows = [
            (f"[`{field.name}`]({field.name}.md)", field.shown, linked(_first(field.meaning), UP))
            for field in fields
        ]
        title = section[0].upper() + section[1:]
        parts += [f"## {title}", linked(text, UP), table(("setting", "default", "what it is"), rows)]
    return "\n\n".join([*parts, *_free_on_resume(ppo)])


def _free_on_resume(ppo: dict[str, Field]) -> list[str]:
    """The settings that a resumed run may change, by section."""
    free: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for name, field in ppo.items():
        if not field.declared.changes_results:
            free[_section(name)].append(f"[`{name}`]({name}.md)")
    return [
        "## What a resumed run may change",
        "A training step computes the same with any value of these, apart from rounding and, with vLLM, from "
        "the random numbers that draw tokens ([never lose a run](../../resume.md#what-may-change)):",
        listed(free),
    ]


def page(name: str) -> str:
    every = [(kind, fields_of(config).get(name)) for kind, config in CONFIGS.items()]
    kinds = [(kind, one) for kind, one in every if one is not None]
    field = kinds[0][1]
    same = len({one.meaning for _, one in kinds}) == 1
    meanings = [linked(field.meaning, UP, name)]
    if not same:
        meanings = [
            f"**{CONFIGS[kind].__name__}** ({_commands(kind)}): {linked(one.meaning, UP, name)}"
            for kind, one in kinds
        ]
    facts = _facts(field, kinds)
    parts = [
        f"# `{name}`",
        *meanings,
        table(facts[0], facts[1:]),
        "## How to set it",
        _how(field, CONFIGS[kinds[0][0]].__name__),
    ]
    if reasons := _reasons(name):
        parts += ["## When to change it", "Metrics that point here, and what they say:", "\n".join(reasons)]
    parts += ["## Read by", ", ".join(f"`{path}`" for path in readers()[name])]
    if more := listed(_see_also(name, [one.meaning for _, one in kinds])):
        parts += ["## See also", more]
    return "\n\n".join(parts)


def _facts(field: Field, kinds: list[tuple[str, Field]]) -> list[tuple[str, ...]]:
    defaults = {one.shown for _, one in kinds}
    default = field.shown
    if len(defaults) > 1:
        default = ", ".join(f"{one.shown} in `{CONFIGS[kind].__name__}`" for kind, one in kinds)
    own = [
        f"[`{command}`](../commands/{command}.md)"
        for command, kind in COMMANDS.items()
        if field.name in fields_of(kind)
    ]
    taken = "; ".join(_commands(kind) for kind, _ in kinds) + (
        f"; a flag of its own in {', '.join(own)}" if own else ""
    )
    facts = [("Type", field.type), ("Default", default), ("Range", allowed(field)), ("Taken by", taken)]
    if kinds[0][0] == "ppo":
        facts.append(("Changes results", _on_resume(field)))
    if field.declared.formerly:
        facts.append(("Formerly", f"`{field.declared.formerly}`, still taken, with a warning"))
    return [
        *facts,
        ("Section", f"[{_section(field.name)}](index.md#{_section(field.name).replace(' ', '-').lower()})"),
    ]


def _on_resume(field: Field) -> str:
    rule = "[resumed run](../../resume.md#what-may-change)"
    if field.declared.changes_results:
        return f"yes: a {rule} may change it only with `--force`"
    return f"no: a {rule} may change it"


def allowed(field: Field) -> str:
    """The values it takes, in words."""
    declared = field.declared
    if declared.values or declared.range is not None:
        return declared.values or str(declared.range and declared.range.in_words)
    if field.choices:
        return "one of these"
    return "true or false" if field.kind is bool else "any but the empty one"


def example(field: Field) -> dict[str, Any]:
    """As a settings file has it: the default, or where that is nothing or a switch, something else."""
    if field.name in EXAMPLES:
        return EXAMPLES[field.name]
    return {field.name: not field.default if isinstance(field.default, bool) else field.default}


def _how(field: Field, config: str) -> str:
    values = example(field)
    value = values[field.name]
    items = value if isinstance(value, list) else [] if isinstance(value, bool) else [value]
    words = "".join(f" {_word(item)}" for item in items)
    python = ", ".join(f"{name}={each!r}" for name, each in values.items())
    lines = yaml.safe_dump(values, sort_keys=False, width=120).strip()
    made = f"{config}({python})"
    return (
        f"As a flag `{field.flag}{words}`, in Python `{made}`, in a settings file:\n\n```yaml\n{lines}\n```"
    )


def _word(item: Any) -> str:
    if not isinstance(item, dict):
        return str(item)
    options = "".join(f",{key}={value}" for key, value in item.get("options", {}).items())
    return f"{item['weight']}*{item['source']}{options}"


def _metrics() -> list[tuple[str, Metric]]:
    return [
        *GLOSSARY.items(),
        *((name, metric) for name, metric in FINETUNING.items() if name not in GLOSSARY),
    ]


def _metric_link(name: str) -> str:
    return f"[`{name}`](../metrics.md#{anchor(name)})"


def _reasons(name: str) -> list[str]:
    """What metrics that are not healthy say of it."""
    return [
        f"- {_metric_link(metric)}: {linked(entry.otherwise, UP, name)}"
        for metric, entry in _metrics()
        if f"`{name}`" in entry.otherwise
    ]


def _see_also(name: str, meanings: list[str]) -> dict[str, list[str]]:
    every = {**fields_of(RewardConfig), **fields_of(PPOConfig)}
    named = {other for other in every if other != name and any(_names(text, other) for text in meanings)}
    named |= {other for other, field in every.items() if other != name and _names(field.meaning, name)}
    told = [metric for metric, entry in _metrics() if f"`{name}`" in entry.healthy + entry.meaning]
    return {
        "settings": [f"[`{other}`]({other}.md)" for other in every if other in named],
        "metrics": [_metric_link(metric) for metric in told],
        "guides": guides_with(rf"`{name}[` ]|{_word_of(name)}|--{name.replace('_', '-')}(?![\w-])", UP),
    }


def _names(text: str, name: str) -> bool:
    """In backticks, or as a word that can be nothing else."""
    return re.search(rf"`{name}`|{_word_of(name)}", text) is not None


def _word_of(name: str) -> str:
    """A pattern for a name without backticks; one that is also an English word has none."""
    return rf"(?<![\w/-]){name}(?!\w)" if "_" in name else "(?!)"


def _section(name: str) -> str:
    ppo = fields_of(PPOConfig)
    return (ppo[name].section or FIRST) if name in ppo else ONLY_FINETUNING


def _commands(config: str) -> str:
    return ", ".join(
        f"[`{name}`](../commands/{name}.md)" for name, kind in COMMANDS.items() if config in configs_of(kind)
    )


def _first(text: str) -> str:
    """The first sentence."""
    return re.split(r"(?<=[a-z0-9)`])\.(?= [A-Z0-9`])", text)[0].rstrip(".") + "."
