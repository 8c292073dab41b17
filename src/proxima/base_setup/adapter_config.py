"""What an adapter's `adapter_config.json`, which may be a stranger's, may ask of PEFT.

In: an adapter's folder. Out: the folder to load it from; a ValueError that names the setting that is refused.

PEFT searches the names of all modules for the regular expressions in it, and one can be made that never ends;
and it lets some ways of initialising an adapter change the base, which other roles share.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open

from proxima.core.json_record import Record
from proxima.core.regular_files import read_file
from proxima.models import ADAPTER_FILE

CONFIG_FILE = "adapter_config.json"
INITIALISED = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base as it is."""
NAME = re.compile(r"\^?(\.\*\\\.)?(\w|\\?\.)+\$?")
"""A module's name, perhaps anchored, perhaps after any others, as PEFT writes it for fused experts: as a
regular expression it is matched at once."""
WEIGHT = re.compile(r"base_model\.model\.(.+)\.lora_(?:embedding_)?A(?:\.weight)?")


@contextmanager
def plain_adapter(folder: str) -> Iterator[str]:
    """The folder, or one with the same weights whose config lists the adapted modules instead of describing
    them."""
    config = _checked(folder)
    if not isinstance(config.get("target_modules"), str) or config["target_modules"] == "all-linear":
        if not _are_names(config.get("exclude_modules") or ()):
            raise ValueError("its exclude_modules is a regular expression; list the names.")
        yield folder
        return
    weights = (Path(folder) / ADAPTER_FILE).resolve()
    with safe_open(weights, framework="pt") as file:
        targets = sorted({found[1] for name in file.keys() if (found := WEIGHT.fullmatch(name))})  # noqa: SIM118
    selection = {"exclude_modules": None, "layers_to_transform": None, "layers_pattern": None}
    with tempfile.TemporaryDirectory(prefix="proxima-") as place:
        plain = {**config, **selection, "target_modules": targets}
        (Path(place) / CONFIG_FILE).write_text(json.dumps(plain), encoding="utf-8")
        try:
            (Path(place) / ADAPTER_FILE).symlink_to(weights)
        except OSError:  # Windows allows few users to make links
            shutil.copyfile(weights, Path(place) / ADAPTER_FILE)
        yield place


def _checked(folder: str) -> Record:
    config = json.loads(read_file(Path(folder) / CONFIG_FILE))
    if not isinstance(config, dict):
        raise ValueError(f"its {CONFIG_FILE} is not a JSON object.")
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"it is an adapter of PEFT's type {kind!r}; only LoRA adapters are loaded.")
    way = config.get("init_lora_weights", True)
    if way not in INITIALISED:
        raise ValueError(
            f"its init_lora_weights is {way!r}, so it belongs to a changed base; convert it to plain LoRA "
            "(path_initial_model_for_weight_conversion of PEFT's save_pretrained)."
        )
    alpha = config.get("lora_alpha", 8)
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise ValueError(f"its lora_alpha is {alpha!r}, not a finite number.")
    for name in ("rank_pattern", "alpha_pattern", "layers_pattern"):
        if not _are_names(config.get(name) or ()):
            raise ValueError(f"its {name} is not plain names of modules.")
    return config


def _are_names(given: object) -> bool:
    """A name, or a list or mapping of them."""
    names = [given] if isinstance(given, str) else given
    return isinstance(names, Iterable) and all(
        isinstance(name, str) and NAME.fullmatch(name) is not None for name in names
    )
