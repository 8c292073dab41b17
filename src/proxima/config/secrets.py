"""Secrets that must not be written down: which names of options, flags and query parameters hide their value.
In: a reward's address, its options, or any text. Out: the same with `***` for each key.

A key belongs in an environment variable (`token_env`). One that stands in an address or an option all the
same is used, but reaches no file, log, tracker or message of ours. Of an address every value in the query is
hidden: its name does not tell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit, urlunsplit

HIDDEN = "***"
SECRET_WORDS = {
    *("secret", "password", "passwd", "credential", "credentials", "auth", "authorization", "bearer"),
    *("apikey", "cookie", "cookies", "header", "headers", "passphrase", "jwt", "pwd", "pem"),
}
SECRET_LAST = (
    "key",
    "keys",
    "token",
    "tokens",
    "pass",
    "sig",
    "signature",
)  # words that may also begin a name
SPECIAL_TOKENS = {"eos", "bos", "pad", "unk", "sep", "mask", "stop", "end"}  # text of a vocabulary, no secret
OPTION = r",(?=[a-z_]+=)"
"""Where an option of a reward begins, in its text."""
COUNTED_TOKENS = {  # of a number of tokens
    *("max", "min", "num", "n", "new", "total", "batch", "batched"),
    *("episode", "prompt", "response", "completion"),
}


def is_secret(name: str) -> bool:
    """Whether an option of this name holds a key: api_key, hf_token, headers; not token_env, which names a
    variable."""
    words = re.split(r"[_\W]+", name.lower())
    if words[-1] == "env":
        return False
    if SECRET_WORDS & set(words) or words[-2:] == ["key", "id"]:
        return True
    counted = words[-1] == "tokens" and COUNTED_TOKENS & set(words)
    return words[-1] in SECRET_LAST and words[0] not in SPECIAL_TOKENS and not counted


def hide_address(address: str) -> str:
    """An http address without what may be a key: user and password, the values of its query, its fragment."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return shareable(address)
    user, at, host = parts.netloc.rpartition("@")
    query = re.sub(
        r"([^=&;]+)=[^&;]*|[^=&;]+", lambda found: f"{found[1]}={HIDDEN}" if found[1] else HIDDEN, parts.query
    )
    hidden = parts._replace(
        netloc=f"{HIDDEN if user else ''}{at}{host}", query=query, fragment=HIDDEN if parts.fragment else ""
    )
    return urlunsplit(hidden)


def hide_options(options: Mapping[str, object]) -> dict[str, object]:
    return {name: HIDDEN if is_secret(name) else value for name, value in options.items()}


def shareable_words(words: Sequence[str]) -> list[str]:
    """The words of a command line without keys: in addresses, in options of a reward (`,api_key=KEY`), and
    after flags whose name tells that one follows."""
    after = ["", *words]
    return [
        HIDDEN
        if before.startswith("--") and is_secret(before[2:]) and not word.startswith("--")
        else _word(word)
        for before, word in zip(after, words, strict=False)
    ]


def _word(word: str) -> str:
    first, *options = re.split(OPTION, word)
    flag, equals, value = first.partition("=")
    if flag.startswith("--") and equals:
        first = f"{flag}={HIDDEN if is_secret(flag[2:]) else _hide_addresses(value)}"
    else:
        first = _hide_addresses(first)
    pairs = [each.partition("=") for each in options]
    hidden = [f",{key}={HIDDEN if is_secret(key) else _hide_addresses(value)}" for key, _, value in pairs]
    return shareable(first + "".join(hidden))


def _hide_addresses(text: str) -> str:
    return re.sub(r"(?i)https?://\S+", lambda found: hide_address(found[0]), text)


def shareable(text: str) -> str:
    """Any text without the keys in it: an address's name and password, a value of its query or a reward's
    option whose name tells that it is one. The options that follow stay."""
    text = re.sub(r"(?<=://)[^/@\s]+@", f"{HIDDEN}@", text)
    return PAIR.sub(
        lambda found: f"{found['name']}={HIDDEN}" if _is_key(found[0][0], found["name"][1:]) else found[0],
        text,
    )


PAIR = re.compile(rf"""(?P<name>[?&;,][\w-]+)=(?:'(?:[^']|'')*'|(?:(?!{OPTION}|;[\w-]+=)[^&\s'"])+)""")
"""A value by name in a query (`?name=value`) or in a reward's options (`,name=value`)."""


def _is_key(separator: str, name: str) -> bool:
    looks_like_one = re.search("key|token|secret|pass|pwd|jwt|auth|sig", name, re.IGNORECASE)
    return is_secret(name) or (separator != "," and looks_like_one is not None)
