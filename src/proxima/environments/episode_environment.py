"""`Environment`: the class and the tools that the settings name, checked once, before anything is sampled.

In: settings and a tokenizer. Out: hosts for the episodes, the tools' schemas, opened prompts.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence

from proxima.config import PPOConfig, RewardSpec
from proxima.core.chat_turns import turns_of
from proxima.core.json_record import Record, RecordView
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Prompt
from proxima.data import ChatTemplate
from proxima.environments.hosts import Host, LocalHost, TurnClock, WorkerHost
from proxima.environments.observation_tokens import ObservationTokens
from proxima.environments.step import Message
from proxima.environments.tool_calls import CALL_MARKS, Schema, find_format
from proxima.rewards import (
    check_options,
    check_sendable,
    columns_of,
    load_function,
    parameters_of,
    reads_environments,
    typed,
)

OWN_METHODS = ("reset", "step", "get_reward", "close", "render")
"""Public methods that are not tools."""
NO_OPTIONS: RecordView = {}


class Environment:
    """What the policy of a run talks to."""

    def __init__(self, config: PPOConfig, tokenizer: Tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self.spec = config.environment[0] if config.environment else None
        self.kind: type | None = None
        self.options: Record = {}
        if self.spec is not None:
            self.kind, self.options = _load_class(self.spec)
        self.is_read = self.kind is not None and any(map(reads_environments, config.rewards))
        """Whether a reward function reads the environments of finished episodes."""
        self.tools = {spec.label: _load(spec, "tool") for spec in config.tools}
        self.methods = {} if self.kind is None or self.has_step else _tool_methods(self.kind)
        if self.kind is not None and not self.has_step and not self.methods:
            raise ValueError(
                f"the environment {self.kind.__name__} has neither step(text) nor public methods as tools"
            )
        if both := self.tools.keys() & self.methods.keys():
            raise ValueError(f"the tool {min(both)!r} is given twice: as a function and as a method")
        self.schemas = {name: _schema(name, each) for name, each in {**self.tools, **self.methods}.items()}
        self.observation_tokens = ObservationTokens(tokenizer)
        self.call_format = ""
        if self.schemas:
            if tokenizer.chat_template:
                self.observation_tokens.check("tool")
            self.call_format = find_format(tokenizer)
        marks: list[int] = tokenizer(CALL_MARKS, add_special_tokens=False)["input_ids"]
        self._unread = set(tokenizer.all_special_ids) - set(marks)
        self._hides_calls = CALL_MARKS not in tokenizer.decode(marks, skip_special_tokens=True)
        """Whether the marks of a call are special tokens, which a text leaves out."""
        self._template = ChatTemplate(tokenizer, list(self.schemas.values()))

    @property
    def has_step(self) -> bool:
        return self.kind is not None and callable(getattr(self.kind, "step", None))

    @property
    def has_reset(self) -> bool:
        return self.kind is not None and callable(getattr(self.kind, "reset", None))

    # --- turns ---

    def said(self, ids: Sequence[int]) -> str:
        """The text of a turn."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def called(self, ids: Sequence[int]) -> str:
        """The text in which the calls of a turn stand."""
        if not self._hides_calls:
            return self.said(ids)
        kept = [token for token in ids if token not in self._unread]
        text: str = self.tokenizer.decode(kept, skip_special_tokens=False)
        return text

    # --- prompts ---

    def is_chat(self, prompt: str) -> bool:
        """Whether observations after this prompt go through the chat template."""
        return bool(self.tokenizer.chat_template and turns_of(prompt))

    def check_template(self, prompts: Sequence[str]) -> None:
        """A ValueError where the chat template would lose what `step` answers after these prompts."""
        if self.has_step and any(map(self.is_chat, prompts)):
            self.observation_tokens.check("user")

    def check(self, prompts: Sequence[str], first: int = 0) -> None:
        """A ValueError where a prompt lacks what `reset` or the tools need; errors count from `first`."""
        self.check_template(prompts)
        needed = [
            p.name
            for p in self._reset_parameters()
            if p.default is p.empty and p.name not in ("seed", "prompt")
        ]
        for number, prompt in enumerate(prompts, first):
            columns = columns_of(prompt)
            if missing := [name for name in needed if name not in columns]:
                have = ", ".join(sorted(columns)) or "none"
                raise ValueError(
                    f"reset of the environment asks for {missing[0]!r}, but the columns of prompt {number} "
                    f"({prompt[:40]!r}) are: {have}; add the column to the data"
                )
            if self.config.step_seconds:
                check_sendable(self.reset_arguments(prompt, 0), "the environment", number)
            if self.schemas and self.tokenizer.chat_template and not turns_of(prompt):
                raise ValueError(
                    f"prompt {number} ({prompt[:40]!r}) is plain text, so that the chat template cannot tell "
                    "the model its tools; give messages (docs/data.md)"
                )

    def reset_arguments(self, prompt: str, seed: int) -> Record:
        """What `reset` is called with: the columns that it takes, and `seed` and `prompt` where it does."""
        known = {"prompt": str(prompt), "seed": seed, **columns_of(prompt)}
        if self._takes_any():
            return known
        names = {p.name for p in self._reset_parameters()}
        return {name: value for name, value in known.items() if name in names}

    def open_prompt(self, prompt: str, messages: Sequence[Message]) -> str:
        """The prompt with what `reset` returned, and with the tools where a chat template names them."""
        if not messages and not self.schemas:
            return prompt
        if not self.is_chat(prompt):
            text = "".join(message["content"] for message in messages)
            return Prompt(prompt + text, columns_of(prompt)) if text else prompt
        said: list[Message] = list(getattr(prompt, "messages", ()))
        said = said or [{"role": turn["role"], "content": turn["text"]} for turn in turns_of(prompt)]
        for message in messages:
            if said and message["role"] == "user" == said[-1]["role"]:
                said[-1] = {"role": "user", "content": said[-1]["content"] + message["content"]}
            else:
                said.append(message)
        made = self._template.prompt(said)
        for message in messages:
            if message["content"].strip() not in made:
                raise ValueError(
                    f"the chat template of {self.tokenizer.name_or_path!r} loses what reset returned in the "
                    f"role {message['role'][:40]!r}; return a text, or messages of the role 'user'"
                )
        return Prompt(str(made), columns_of(prompt), made.turns, made.messages)

    # --- hosts ---

    def new_host(self, clock: TurnClock) -> Host | None:
        """For one episode; None where there are tools alone."""
        if self.kind is None or self.spec is None:
            return None
        return self._host(self.spec, self.kind, clock, self.options)

    def tool_hosts(self, clock: TurnClock) -> dict[str, Host]:
        """One for each function, for one episode."""
        specs = {spec.label: spec for spec in self.config.tools}
        return {name: self._host(specs[name], function, clock) for name, function in self.tools.items()}

    def _host(
        self,
        spec: RewardSpec,
        target: Callable[..., object],
        clock: TurnClock,
        options: RecordView = NO_OPTIONS,
    ) -> Host:
        closes = inspect.isclass(target) and callable(getattr(target, "close", None))
        config = self.config
        if config.step_seconds:
            given = spec.source if isinstance(spec.source, str) else target
            return WorkerHost(given, options, clock, config.step_memory_mb, closes)
        return LocalHost(target, options, closes)

    def _reset_parameters(self) -> list[inspect.Parameter]:
        if self.kind is None or not self.has_reset:
            return []
        parameters = inspect.signature(_bound(self.kind, "reset")).parameters.values()
        return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    def _takes_any(self) -> bool:
        if self.kind is None or not self.has_reset:
            return False
        parameters = inspect.signature(_bound(self.kind, "reset")).parameters.values()
        return any(p.kind is p.VAR_KEYWORD for p in parameters)


def check_environments(config: PPOConfig) -> None:
    """A ValueError for what is wrong with environment and tools before a model is loaded."""
    if config.environment:
        _load_class(config.environment[0])
    for spec in config.tools:
        _schema(spec.label, _load(spec, "tool"))


def _load(spec: RewardSpec, what: str) -> Callable[..., object]:
    return load_function(spec.source, what) if isinstance(spec.source, str) else spec.source


def _load_class(spec: RewardSpec) -> tuple[type, Record]:
    """The class, and the options of the entry as its `__init__` takes them."""
    kind = _load(spec, "environment")
    if not inspect.isclass(kind):
        raise ValueError(
            f"the environment {spec.label!r} is not a class; give module:Class, and in place of a function "
            "that makes one its options: module:Class,level=3"
        )
    parameters = parameters_of(kind)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    options = check_options(spec, typed(kind, list(named)), takes_any, "environment")
    if missing := [name for name, p in named.items() if p.default is p.empty and name not in options]:
        raise ValueError(
            f"environment {spec.label!r} needs the option {missing[0]!r}, for example "
            f"module:Class,{missing[0]}=..."
        )
    return kind, options


def _tool_methods(kind: type) -> dict[str, Callable[..., object]]:
    """The public methods of a class, in the order of their definition, as functions without `self`. Static
    ones are helpers, as in TRL."""
    names = [name for base in reversed(kind.__mro__[:-1]) for name in vars(base)]
    public = [name for name in dict.fromkeys(names) if not name.startswith("_") and name not in OWN_METHODS]
    bound = {name: _bound(kind, name) for name in public}
    return {name: method for name, method in bound.items() if inspect.ismethod(method)}


def _bound(kind: type, name: str) -> Callable[..., object]:
    """A method of a class as an instance has it, without an instance."""
    found: Callable[..., object] = getattr(kind, name)
    is_plain = inspect.isfunction(inspect.getattr_static(kind, name))
    return types.MethodType(found, object()) if is_plain else found


def _schema(name: str, function: Callable[..., object]) -> Schema:
    from transformers.utils import get_json_schema

    try:
        schema: Schema = get_json_schema(function)
    except Exception as error:  # it names what is missing
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the tool {name!r} needs a type for each argument, and a docstring with an Args section that "
            f"describes each ({reason})"
        ) from None
    return {**schema, "function": {**schema["function"], "name": name}}
