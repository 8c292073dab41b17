"""Prompts from a file. In: .txt (one a line) or .jsonl (a `prompt` field). Out: a list of texts, or the line that is wrong."""

from __future__ import annotations

import json
from pathlib import Path


def read_prompts(path: str | Path) -> list[str]:
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompts in {path}: {error}") from None
    if path.suffix == ".jsonl":
        prompts = [_prompt_field(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    elif path.suffix == ".txt":
        prompts = [line.replace("\\n", "\n") for line in lines if line.strip()]
    else:
        raise ValueError(f"{path} must end in .txt (one prompt a line, \\n for a line break) or .jsonl (a `prompt` field)")
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def _prompt_field(line: str, path: Path, number: int) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{path}, line {number}: not a JSON object with a `prompt` field") from None
    if not isinstance(prompt, str):
        raise ValueError(f"{path}, line {number}: `prompt` is a {type(prompt).__name__}, not a text")
    return prompt
