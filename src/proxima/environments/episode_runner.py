"""`EpisodeRunner`: the episodes of one batch: `reset`, turns, tool calls and the limit on their output,
failures, the end.

In: turns that the policy sampled. Out: what it reads next, and an `Episode` for each row. Whatever a user's
code does costs its own episode and no other. In this process, turns are answered one after the other; with a
process per episode, several at once, while others are sampled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

from proxima.core.encoding import encode_prompts
from proxima.core.episode import Episode, Reply
from proxima.core.json_record import Record
from proxima.data import Skip
from proxima.environments.episode_environment import Environment
from proxima.environments.episode_limits import max_response_tokens
from proxima.environments.hosts import LONGEST_REASON, Host, HostFailure, TurnClock
from proxima.environments.step import LONGEST, Answered, Message, read_observation, read_reward, read_step
from proxima.environments.tool_calls import MalformedCall, read_calls
from proxima.rewards import ATTRIBUTES

MOST_AT_ONCE = 32  # calls of workers that are waited for at the same time
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class _Running:
    """An episode that is not over."""

    prompt: str
    host: Host | None
    tools: dict[str, Host]
    clock: TurnClock
    episode: Episode = field(default_factory=Episode)
    tokens: int = 0  # after the prompt

    @property
    def hosts(self) -> list[Host]:
        return [*([] if self.host is None else [self.host]), *self.tools.values()]

    def cancel(self) -> None:
        for host in self.hosts:
            host.cancel()

    def close(self) -> None:
        for host in self.hosts:
            host.close()


def _running(environment: Environment, prompt: str) -> _Running:
    clock = TurnClock(environment.config.step_seconds)
    return _Running(prompt, environment.new_host(clock), environment.tool_hosts(clock), clock)


class EpisodeRunner:
    """A `Conversation` with an environment and tools."""

    def __init__(
        self,
        environment: Environment,
        prompts: Sequence[str],
        seeds: Sequence[int],
        room: int | None,
        eos_ids: Sequence[int],
    ):
        """
        Args:
            seeds: of the environments, one per prompt.
            room: most tokens of a prompt; None = any number.
            eos_ids: with which a turn ends that was not cut.
        """
        environment.check_template(prompts)
        self.environment, self.room, self.eos_ids = environment, room, eos_ids
        config = environment.config
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE) if config.step_seconds else None
        self._coming: set[Future[Reply]] = set()
        self._come: list[Reply] = []
        self.running = [_running(environment, prompt) for prompt in prompts]
        self.prompts = self._map(self._open, list(zip(self.running, seeds, strict=True)))
        """As they were opened."""

    @property
    def episodes(self) -> list[Episode]:
        return [running.episode for running in self.running]

    def close(self) -> None:
        """Calls that still run, after Ctrl-C, are given up."""
        waiting = [future for future in self._coming if not future.cancel()]
        if waiting:
            for running in self.running:
                running.cancel()
            wait(waiting)
        self._map(_Running.close, self.running)
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    # --- a conversation ---

    def finish_turn(self, row: int, ids: list[int]) -> None:
        if self._threads is None:
            self._come.append(self._answer(row, ids))
        else:
            self._coming.add(self._threads.submit(self._answer, row, ids))

    def replies(self, wait_for_one: bool) -> list[Reply]:
        if self._coming:
            done = wait(self._coming, None if wait_for_one else 0, FIRST_COMPLETED).done
            self._coming -= done
            self._come += [future.result() for future in done]
        come, self._come = self._come, []
        return come

    # --- one episode ---

    def _open(self, given: tuple[_Running, int]) -> str:
        """Reset, and the prompt to begin with; where that fails, the row's own."""
        running, seed = given
        environment = self.environment
        prompt = running.prompt
        messages = list[Message]()
        try:
            if running.host is not None and environment.has_reset:
                returned = running.host.call("reset", **environment.reset_arguments(prompt, seed))
                if (
                    isinstance(returned, (tuple, list))
                    and len(returned) == 2
                    and isinstance(returned[1], dict)
                ):
                    returned = returned[0] if not isinstance(returned[0], dict) else returned  # with its info
                messages = read_observation("reset", returned)
            opened = environment.open_prompt(prompt, messages)
            if opened != prompt and self.room is not None and not environment.config.truncate_prompts:
                size = len(encode_prompts(environment.tokenizer, [opened])[0])
                if size > self.room:
                    raise ValueError(
                        f"with what reset returned the prompt has {size} tokens, and there is room for "
                        f"{self.room}"
                    )
            return opened
        except Exception as error:  # what a user's code returns may raise anything
            self._fail(running, ("reset: " if isinstance(error, HostFailure) else "") + _in_words(error))
            return prompt

    def _answer(self, row: int, ids: list[int]) -> Reply:
        running = self.running[row]
        episode, config = running.episode, self.environment.config
        running.tokens += len(ids)
        running.clock.restart()
        if episode.failure:
            return Reply(row, [], False)
        try:
            answered = self._respond(running, ids, is_cut=not ids or ids[-1] not in self.eos_ids)
            read = self._read(running, answered, ids)
            left = max_response_tokens(config) - running.tokens
            goes_on = (
                not (answered.done or answered.cut)
                and len(episode.rewards) + 1 < config.max_turns
                and len(read) < left
            )
            reward = answered.reward if goes_on else answered.reward + self._last_reward(running)
            if not goes_on:
                self._keep_attributes(running)
        except Exception as error:  # what a user's code returns may raise anything
            self._fail(running, _in_words(error))
            return Reply(row, [], False)
        episode.rewards.append(reward)
        if goes_on:
            running.tokens += len(read)
            return Reply(row, read, True)
        episode.done = answered.done
        running.close()
        # what follows a cut episode is where its value is read
        shown = not answered.done and config.cut_responses == "bootstrap" and len(read) <= left
        return Reply(row, read if shown else [], False)

    def _respond(self, running: _Running, ids: Sequence[int], is_cut: bool) -> Answered:
        """By the tools that the turn calls, else by the environment's step; a turn without either is the
        last, and the episode is cut where it was."""
        environment = self.environment
        if environment.schemas:
            try:
                calls = read_calls(environment.call_format, environment.called(ids), environment.schemas)
            except MalformedCall as error:
                running.episode.malformed += 1
                return Answered([_result("error", f"error: {error}")], 0.0, False)
            if calls:
                results = [_result(call.name, self._use(running, *call)) for call in calls]
                return Answered(results, 0.0, False)
        if environment.has_step:
            assert running.host is not None
            return read_step(running.host.call("step", environment.said(ids)))
        return Answered([], 0.0, done=not is_cut, cut=is_cut)

    def _use(self, running: _Running, name: str, arguments: Record) -> str:
        """What a tool returns, or raises, as text; but where an environment is gone, the episode is lost."""
        own = running.tools.get(name)
        host = own or running.host
        assert host is not None
        try:
            returned = host.call(None if own else name, **arguments)
        except HostFailure as error:
            if own is None and not error.raised:
                raise
            running.episode.malformed += 1
            return f"error: {error}"
        text = returned if isinstance(returned, str) and returned else json.dumps(returned, default=str)
        if len(text) > LONGEST:
            raise ValueError(f"the tool {name} returned {len(text):,} characters, more than {LONGEST:,}")
        return text

    def _read(self, running: _Running, answered: Answered, turn: list[int]) -> list[int]:
        """The ids of an observation."""
        if not answered.messages or answered.done:
            return []
        environment = self.environment
        chat = environment.is_chat(running.prompt)
        ids = environment.observation_tokens.ids(answered.messages, turn, chat)
        if not ids:
            raise ValueError("the observation is empty, but the episode is not done")
        return ids

    def _last_reward(self, running: _Running) -> float:
        """What `get_reward` returns at the end of an episode; or, where tools are methods and no reward
        function reads it, `reward`."""
        environment = self.environment
        running.clock.restart()  # the last turn may have used up its own
        if running.host is None:
            return 0.0
        if callable(getattr(environment.kind, "get_reward", None)):
            return read_reward("get_reward", running.host.call("get_reward"))
        if environment.has_step or environment.is_read:
            return 0.0
        try:
            return read_reward("reward", running.host.call("__getattribute__", "reward"))
        except HostFailure as error:
            if error.raised:  # it has none
                return 0.0
            raise

    def _keep_attributes(self, running: _Running) -> None:
        """For the reward functions that read environments."""
        if self.environment.is_read and running.host is not None:
            found = running.host.call(ATTRIBUTES)
            assert isinstance(found, list)
            running.episode.attributes, running.episode.unreadable = found

    def _fail(self, running: _Running, reason: str) -> None:
        running.episode.failure = reason
        running.close()

    def _map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        return list(map(work, items) if self._threads is None else self._threads.map(work, items))


def _in_words(error: Exception) -> str:
    own = isinstance(error, (HostFailure, Skip)) or type(error) is ValueError
    return str(error) if own else " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]


def _result(name: str, content: str) -> Message:
    """Half of a character pair, which no tokenizer takes, is read as a question mark."""
    return {"role": "tool", "name": name, "content": content.encode(errors="replace").decode()}
