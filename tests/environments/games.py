"""Environments and tools for tests. They lie in a module, so that worker processes can import them."""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time

import numpy as np

from proxima import Step


class Parity:
    """Asks for a text of even length, three times; the answer shows what was said."""

    def reset(self, seed):
        self.random = random.Random(seed)
        self.turns = 0

    def step(self, text):
        self.turns += 1
        shown, malus = self.random.randint(10, 99), self.random.random()
        return Step(f" [{shown}]", 1.0 if len(text) % 2 == 0 else -0.25 * malus, self.turns == 3)


class Closed(Parity):
    """Notes in a file that it was closed."""

    def reset(self, seed, folder):
        super().reset(seed)
        self.folder = folder

    def close(self):
        with open(os.path.join(self.folder, "closed"), "a", encoding="utf-8") as file:
            file.write("closed\n")
        raise RuntimeError("closed badly")


class Levels(Parity):
    """Shows how it was made."""

    def __init__(self, level: int, rate: float = 0.5):
        self.level, self.rate = level, rate

    def reset(self, seed):
        super().reset(seed)
        return f" {self.level} {self.rate!r}"


class Slow(Parity):
    """The same, but each answer takes another time, whatever the seed is."""

    def step(self, text):
        time.sleep(random.SystemRandom().random() / 20)
        return super().step(text)


class Unseeded(Parity):
    """Begins in another way each time."""

    def reset(self, seed):
        super().reset(seed)
        return f" {random.SystemRandom().random()}"


class Gym:
    """As gymnasium has them: five values, and `reset` with information."""

    def reset(self, *, seed=None, options=None):
        self.left = 2
        return " start:", {"random": random.Random(seed)}

    def step(self, action):
        self.left -= 1
        return f" {self.left} left", 0.5, False, self.left == 0, {"board": object()}


class Counter:
    """As TRL has them: public methods are tools, and the reward is an attribute."""

    def __init__(self, first: int = 0):
        self.first = first

    def reset(self, **columns):
        self.count = self.first
        self.reward = 0.0
        return " Count to two."

    @staticmethod
    def helper(number):  # no tool: it has no schema
        return number

    def add(self, number: int) -> int:
        """
        Adds to the count.

        Args:
            number: How much to add.
        """
        self.count += number
        self.reward = float(self.count == 2)
        return self.count


class Graded(Counter):
    def get_reward(self):
        return 10.0 * self.count


class Attributes(Parity):
    """Attributes of every kind."""

    shared = "of the class"

    def reset(self, seed):
        super().reset(seed)
        self.random = random.Random(seed)
        self.many, self._hidden = [1, 2], 3
        self.long = "x" * 300_000
        self.deep = json.loads("[" * 600 + "]" * 600)

    @property
    def doubled(self):
        return 2 * self.turns

    @property
    def broken(self):
        raise RuntimeError("not now")


def multiply(left: int, right: int) -> int:
    """
    Multiplies two numbers.

    Args:
        left: The first number.
        right: The second number.
    """
    return left * right


def repeat(count: int) -> str:
    """
    Writes a letter.

    Args:
        count: How often.
    """
    return "x" * count


def echo(text: str) -> str:
    """
    Says it again.

    Args:
        text: What to say.
    """
    return text


def half() -> str:
    """
    Says half of a character pair.
    """
    return "a\ud800b"


def after(timeout: int, method: str) -> str:
    """
    Says its arguments, whose names the trainer's own calls use too.

    Args:
        timeout: A number.
        method: A text.
    """
    return f"{timeout} {method}"


def hang(seconds: float) -> str:
    """
    Waits.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


class Faulty(Parity):
    """One fault per episode, by the name in the column `fault`; none where it is empty."""

    def reset(self, seed, fault=""):
        super().reset(seed)
        self.fault = fault
        if fault == "reset raises":
            raise RuntimeError("no such level")
        if fault == "reset returns a number":
            return 7
        if fault == "reset returns too much":
            return "x" * 10_000_000
        if fault == "reset returns more than fits":
            return "word " * 400
        return None

    def step(self, text):
        step = super().step(text)
        if self.fault in RETURNED:
            return RETURNED[self.fault]
        if self.fault == "raises":
            raise KeyError("lost")
        if self.fault == "exits":
            sys.exit(3)
        if self.fault == "kills itself":
            os._exit(3)
        if self.fault == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "prints a lot":
            print("x" * 10_000_000)
        if self.fault == "hangs":
            time.sleep(600)
        if self.fault == "takes 5 GiB":
            bytes(5 * 2**30)  # address space; the pages are not touched
        return step


RETURNED = {
    "returns None": None,
    "returns a pair": ("text", 1.0),
    "observes a number": Step(3, 1.0),
    "observes half a character": Step("\ud800", 1.0),
    "rewards a list": Step("text", [1.0]),
    "observes nothing": Step(None, 1.0),
    "observes an empty text": Step("", 1.0),
    "observes too much": Step("x" * 10_000_000, 1.0),
    "nan": Step("text", float("nan")),
    "infinite": Step("text", float("inf")),
    "a text as reward": Step("text", "1"),
    "a number as done": Step("text", 1.0, 1),
    "huge": Step("text", 1e39),
    "huge in sum": Step("text", 3e38),
    "an array": Step("text", np.ones(1)),
    "never ends": Step(" again", 0.0),
}
FAULTS = [
    *("reset raises", "reset returns a number", "reset returns too much", "reset returns more than fits"),
    *("raises", "exits"),
    *(name for name in RETURNED if name not in ("never ends", "huge in sum")),
]
KILLED = ["kills itself", "crashes", "hangs", "takes 5 GiB"]  # the trainer survives them by another process
HARMLESS = ["", "never ends", "prints a lot"]


class Hostile(Parity):
    """Acts against the process that it is in, once per episode."""

    shared = 0  # in a process of its own nobody else sees it

    def reset(self, seed, fault=""):
        super().reset(seed)
        self.fault = fault
        Hostile.shared += 1
        return f" {Hostile.shared}"

    def step(self, text):
        step = super().step(text)
        if self.turns == 2 and self.fault:
            return HOSTILE[self.fault](step) or step
        return step


def _write_everywhere(data):
    for number in range(3, 64):
        try:
            os.write(number, data)
        except OSError:
            continue


def _ignore_signals(step):
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN)
    time.sleep(600)


def _leave_a_child(step):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)


def _raise_badly(step):
    class BadError(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    raise BadError


def _nested(step):
    value = []
    for _ in range(20_000):
        value = [value]
    return step._replace(observation=value)


def _start_threads(step):
    threading.Thread(target=lambda: time.sleep(600)).start()


def _raise_at_length(step):
    raise ValueError("words\n" * 1_000_000)


def _close_output(step):
    sys.stdout.close()
    os.close(1)


def _write_to_output(step):
    os.write(1, b'{"id": 3, "value": [" x", 9.0, true]}\n')


def _fork_and_return(step):
    os.fork()


def _recurse(step):
    return _recurse(step)


HOSTILE = {
    "closes standard output": _close_output,
    "writes to standard output": _write_to_output,
    "forks, and both return": _fork_and_return,
    "leaves a child": _leave_a_child,
    "starts a thread": _start_threads,
    "closes everything": lambda step: os.closerange(0, 64),
    "writes garbage everywhere": lambda step: _write_everywhere(b"garbage\n"),
    "ignores all signals": _ignore_signals,
    "stops itself": lambda step: os.kill(os.getpid(), signal.SIGSTOP),
    "raises what has no words": _raise_badly,
    "raises at length": _raise_at_length,
    "is nested deeply": _nested,
    "recurses": _recurse,
}
UNHARMED = list(HOSTILE)[:5]


class Once:
    """One turn, whose reward is what its bytes are modulo 7."""

    def step(self, text):
        return Step(reward=odd_sum([""], [text])[0], done=True)


def odd_sum(prompts, completions):
    return [sum(text.encode()) % 7 / 7 for text in completions]


def said_and_read(prompts, completions, turns):
    """Of each episode, how many turns the policy had and how many characters it read, as one number."""
    own = [[turn["text"] for turn in each if turn["role"] == "assistant"] for each in turns]
    read = [[turn["text"] for turn in each if turn["role"] == "environment"] for each in turns]
    return [100.0 * len(one) + len("".join(other)) for one, other in zip(own, read, strict=True)]
