"""Reads a TRL PPO script without running it. In: its text. Out: `OldRun`, or an error that says why not."""

from __future__ import annotations

import ast
import re
import warnings

from proxima.tools.migrate.old_run import UNREAD, OldRun, Setting
from proxima.tools.migrate.script_values import Values, shown
from proxima.tools.migrate.trl_settings import KNOWN, LORA_CONFIG, TRAINER_ARGUMENTS

PARSED = ("parse_args_into_dataclasses", "parse_args_and_config")
DATACLASSES = ("PPOConfig", "ModelConfig", "ScriptArguments")
FILE_KINDS = ("json", "csv", "parquet", "text")
FOLLOWED = 20  # most steps from a name to what it stands for


def read_script(text: str, name: str) -> OldRun:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the script's own syntax
            values = Values(ast.parse(text))
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ValueError(f"{name}{line}: this is not Python ({error.msg})") from None
    except (ValueError, RecursionError, MemoryError):
        raise ValueError(
            f"{name}: this cannot be read as Python; is it a text file, and not nested too deeply?"
        ) from None
    return Reader(values, name).read()


class Reader:
    """Takes one script apart."""

    def __init__(self, values: Values, name: str):
        self.values, self.run = values, OldRun(name)
        self.held: dict[str, str] = {}  # names that hold a dataclass -> which

    def read(self) -> OldRun:
        self.check_kind()
        self.find_holders()
        for kind in DATACLASSES:
            calls = self.values.calls(kind)
            if kind == "PPOConfig" and len(calls) > 1:
                lines = ", ".join(str(call.lineno) for call in calls)
                raise ValueError(
                    f"{self.run.name} makes {len(calls)} PPOConfigs (lines {lines}); leave the one to migrate"
                )
            for call in calls:
                self.read_call(call)
        self.read_changes()
        trainer = self.read_trainer()
        self.read_lora(trainer.get("peft_config"))
        self.read_data(trainer.get("train_dataset"))
        return self.run

    def check_kind(self) -> None:
        """Refuse anything but a PPO script of TRL."""
        values = self.values
        named = set(values.imported.values()) | {
            values.called(node) for node in values.nodes if isinstance(node, ast.Call)
        }
        if not named & {"PPOConfig", "PPOTrainer"}:
            imports = [
                node
                for node in values.nodes
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl")
            ]
            others = [
                alias.name
                for node in imports
                for alias in node.names
                if re.fullmatch(r"[A-Z]+[a-z]*(Trainer|Config)", alias.name)
            ]
            if others := sorted(set(others) - {"ModelConfig"}, reverse=True):
                raise ValueError(
                    f"{self.run.name} is a script for TRL's {others[0]}; only PPO scripts can be migrated"
                )
            raise ValueError(
                f"{self.run.name} is not a PPO script of TRL: it makes neither a PPOConfig nor a PPOTrainer"
            )
        for node in values.nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "proxima":
                raise ValueError(f"{self.run.name}, line {node.lineno}: this is already a Proxima script")
            if isinstance(node, ast.ClassDef) and any(
                shown(base).endswith("PPOConfig") for base in node.bases
            ):
                self.run.unread.append(
                    f"class {node.name} (line {node.lineno}): defaults of a class of your own are not read"
                )
                values.imported[node.name] = "PPOConfig"

    def find_holders(self) -> None:
        """The names that hold TRL's dataclasses, made by a call or by a command-line parser."""
        for name, nodes in self.values.assigned.items():
            for node in nodes:
                if self.values.called(node) in DATACLASSES:
                    self.held[name] = self.values.called(node)
        self.find_parsed()
        for name in self.held:
            self.values.fields[name] = lambda field: self.run.get(field) if field in KNOWN else None

    def find_parsed(self) -> None:
        kinds: list[str] = []
        for call in self.values.calls("HfArgumentParser", "TrlParser"):
            given = [*call.args, *(item.value for item in call.keywords if item.arg == "dataclass_types")]
            if given:
                items = given[0].elts if isinstance(given[0], (ast.Tuple, ast.List)) else [given[0]]
                kinds = [
                    self.values.imported.get(kind, kind)
                    for kind in (shown(item).split(".")[-1] for item in items)
                ]
        for node in self.values.nodes:
            if isinstance(node, ast.Assign) and self.values.called(node.value) in PARSED:
                target = node.targets[0]
                names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
                for item, kind in zip(names, kinds, strict=False):
                    if isinstance(item, ast.Name) and kind in DATACLASSES:
                        self.held[item.id] = kind
                self.run.unread.append(
                    f"{shown(node.value)} (line {node.lineno}): settings come from a command line; those not "
                    "named here are TRL's defaults. To include them, migrate the shell script or YAML that "
                    "starts it"
                )

    def read_call(self, call: ast.Call, names: dict[str, str] | None = None) -> None:
        """The arguments of one dataclass; `names` renames them (None = they are TRL's)."""
        for position, node in enumerate(call.args):
            if (
                position == 0
                and names is None
                and self.values.called(call) == "PPOConfig"
                and not isinstance(node, ast.Starred)
            ):
                self.run.put("output_dir", self.values.setting(node))
            else:
                self.run.unread.append(f"{shown(node)} (line {node.lineno}): an argument without a name")
        for item in call.keywords:
            if item.arg is not None:
                self.put(item.arg, self.values.setting(item.value), names)
                continue
            for name, setting in self.unpacked(item.value):
                self.put(name, setting, names)

    def unpacked(self, node: ast.expr) -> list[tuple[str, Setting]]:
        """The items of `**node`."""
        line = node.lineno
        found = node
        if isinstance(found, ast.Name):
            found = self.values.only(found.id) or found
        if isinstance(found, ast.Call) and self.values.called(found) == "dict" and not found.args:
            named = [(item.arg, self.values.setting(item.value)) for item in found.keywords if item.arg]
            if len(named) == len(found.keywords):
                return named
        if isinstance(found, ast.Dict):
            items: list[tuple[str, Setting]] = []
            for key, value in zip(found.keys, found.values, strict=True):
                if key is None:
                    items += self.unpacked(value) if isinstance(value, ast.Dict) else []
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    items.append((key.value, self.values.setting(value)))
                elif key is not None or not isinstance(value, ast.Dict):
                    self.run.unread.append(
                        f"{shown(key or value)} (line {value.lineno}): the name of a setting is computed"
                    )
            return items
        self.run.unread.append(f"**{shown(node)} (line {line}): the settings in it are computed")
        return []

    def put(self, name: str, setting: Setting, names: dict[str, str] | None) -> None:
        if names is None:
            self.run.put(name, setting)
        elif name in names:
            self.run.put(names[name], setting)
        else:
            self.run.unread.append(f"{name} of LoraConfig ({setting.where}): adapters here are plain LoRA")

    def read_changes(self) -> None:
        """`args.kl_coef = 0.1` after the dataclass was made."""
        for node in self.values.nodes:
            if isinstance(node, ast.Call) and self.values.called(node) == "setattr":
                self.run.unread.append(f"{shown(node)} (line {node.lineno}): what it sets is not read")
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AugAssign)
                else []
            )
            for target in targets:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id in self.held
                ):
                    assert isinstance(node, (ast.Assign, ast.AugAssign))
                    setting = self.values.setting(node.value)
                    if isinstance(node, ast.AugAssign) or self.values.is_conditional(node):
                        setting = Setting(
                            UNREAD, f"line {node.lineno}", f"{shown(node)}, under a condition or a loop"
                        )
                    self.run.put(target.attr, setting)

    def read_trainer(self) -> dict[str, ast.expr]:
        """The arguments of PPOTrainer, and the checkpoints behind its models."""
        calls = self.values.calls("PPOTrainer")
        if len(calls) > 1:
            lines = ", ".join(str(call.lineno) for call in calls)
            raise ValueError(
                f"{self.run.name} makes {len(calls)} PPOTrainers (lines {lines}); leave the one to migrate"
            )
        if not calls:
            return {}
        given = dict(zip(TRAINER_ARGUMENTS, calls[0].args, strict=False))
        for item in calls[0].keywords:
            if item.arg is None:
                self.run.unread.append(
                    f"**{shown(item.value)} (line {item.value.lineno}): arguments of PPOTrainer are computed"
                )
            elif item.arg in TRAINER_ARGUMENTS:
                given[item.arg] = item.value
            else:
                where = f"line {item.value.lineno}"
                self.run.unknown.append(f"{item.arg} ({where}): TRL 1.12's PPOTrainer has no such argument")
        for role in ("model", "ref_model", "reward_model", "value_model"):
            if role in given:
                self.run.models[role] = self.checkpoint(given[role], role)
        for name in ("data_collator", "eval_dataset", "optimizers", "callbacks"):
            if name in given and not (isinstance(given[name], ast.Constant) and given[name].value is None):  # type: ignore[attr-defined]
                self.run.arguments[name] = f"line {given[name].lineno}"
        return given

    def checkpoint(self, node: ast.expr, role: str) -> Setting:
        """The name behind a model: through names, `.to(...)`, `get_peft_model(...)` to
        `from_pretrained(...)`."""
        first, seen = node, 0
        while seen < FOLLOWED:
            seen += 1
            if isinstance(node, ast.Name):
                found = [item for item in self.values.assigned.get(node.id, []) if not _is_none(item)]
                if not found and self.values.assigned.get(node.id):
                    return Setting(None, f"line {first.lineno}")
                if len(found) != 1:
                    break
                node = found[0]
            elif _is_none(node):
                return Setting(None, f"line {first.lineno}")
            elif (
                isinstance(node, ast.Call)
                and self.values.called(node) == "from_pretrained"
                and _loader(node) != "PeftModel"
            ):
                if role == "model":
                    self.read_loading(node)
                return self._loaded(node)
            elif (inside := self._inside(node)) is not None:
                node = inside
            else:
                break
        return Setting(UNREAD, f"line {first.lineno}", shown(node))

    def _loaded(self, call: ast.Call) -> Setting:
        """The name that `from_pretrained(...)` loads."""
        given = call.args or [
            item.value for item in call.keywords if item.arg == "pretrained_model_name_or_path"
        ]
        if not given:
            return Setting(UNREAD, f"line {call.lineno}", shown(call))
        return self.values.setting(given[0])

    def _inside(self, node: ast.expr) -> ast.expr | None:
        """The model in `get_peft_model(model)` or `model.to(...)`; None where it is neither."""
        if not isinstance(node, ast.Call):
            return None
        if self.values.called(node) in ("get_peft_model", "create_reference_model") and node.args:
            return node.args[0]
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda", "eval"):
            return node.func.value
        return None

    def read_loading(self, call: ast.Call) -> None:
        """The other arguments of the policy's `from_pretrained`."""
        named = [(item.arg, self.values.setting(item.value)) for item in call.keywords if item.arg]
        named += [pair for item in call.keywords if item.arg is None for pair in self.unpacked(item.value)]
        for name, setting in named:
            if name in ("dtype", "torch_dtype") and setting.written:
                self.run.settings.setdefault("dtype", setting)
            elif name == "revision" and setting.written:
                self.run.settings.setdefault("model_revision", setting)
            elif name == "trust_remote_code":
                self.run.trust_remote_code = setting

    def read_lora(self, given: ast.expr | None) -> None:
        """LoRA settings from PEFT's own config; those of ModelConfig are read with it."""
        calls = self.values.calls("LoraConfig")
        if isinstance(given, ast.Name):
            given = self.values.only(given.id) or given
        chosen = [call for call in calls if call is given] or calls
        if len(chosen) > 1:
            lines = ", ".join(str(call.lineno) for call in chosen)
            self.run.unread.append(
                f"LoraConfig: there are {len(chosen)} (lines {lines}); set lora_r, lora_alpha, lora_targets"
            )
        elif chosen:
            self.run.peft = True
            where = f"PEFT's default, line {chosen[0].lineno}"
            for name, default in LORA_CONFIG.values():
                if name in ("lora_r", "lora_alpha", "lora_target_modules"):
                    self.run.put(name, Setting(default, where))
            self.read_call(chosen[0], {old: name for old, (name, _) in LORA_CONFIG.items()})
        elif given is not None and not _is_none(given) and self.values.called(given) != "get_peft_config":
            self.run.unread.append(
                f"peft_config = {shown(given)} (line {given.lineno}): set lora_r, lora_alpha, lora_targets"
            )

    def read_data(self, given: ast.expr | None) -> None:
        calls = self.values.calls("load_dataset", "load_from_disk")
        if len(calls) > 1 and given is not None:
            behind = self.behind(given)
            calls = [call for call in calls if id(call) in behind] or calls
        if len(calls) > 1:
            lines = ", ".join(str(call.lineno) for call in calls)
            self.run.unread.append(f"the data: it is loaded {len(calls)} times (lines {lines}); give --data")
        elif calls:
            self.run.data = self.source(calls[0], given)

    def behind(self, node: ast.expr) -> set[int]:
        """All nodes that an expression is made of, names followed."""
        seen: set[int] = set()
        pending: list[ast.AST] = [node]
        names: set[str] = set()
        while pending:
            for item in ast.walk(pending.pop()):
                seen.add(id(item))
                if isinstance(item, ast.Name) and item.id not in names:
                    names.add(item.id)
                    pending += self.values.assigned.get(item.id, [])
        return seen

    def split(self, call: ast.Call, given: ast.expr | None) -> object:
        """The split taken from the result of `load_dataset`: `load_dataset(...)["train"]`, or by the name it
        was assigned to."""
        above = self.values.parents.get(id(call))
        if isinstance(above, ast.Subscript):
            return self.values.value(above.slice)
        names = {name for name, nodes in self.values.assigned.items() if call in nodes}
        behind = None if given is None else self.behind(given)
        taken = [
            self.values.value(node.slice)
            for node in self.values.nodes
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in names
            if behind is None or id(node) in behind
        ]
        found = [split for place, split in enumerate(taken) if split not in taken[:place]]
        return found[0] if len(found) == 1 else UNREAD if found else ""

    def source(self, call: ast.Call, train: ast.expr | None) -> Setting:
        """What `--data` takes, from `load_dataset(...)`."""
        named = {item.arg: item.value for item in call.keywords if item.arg}
        positional = dict(zip(("path", "name", "data_dir", "data_files", "split"), call.args, strict=False))
        given = {**positional, **named}
        where, text = f"line {call.lineno}", shown(call)
        values = {
            name: self.values.value(given[name])
            for name in ("path", "name", "data_files", "split")
            if name in given
        }
        path = values.get("path")
        config = values.get("name")
        split = values.get("split") or ""
        if path in FILE_KINDS and isinstance(values.get("data_files"), str):
            return Setting(values["data_files"], where)
        split = split or self.split(call, train)
        parts = re.fullmatch(r"([\w.-]*)(?:\[:(\d{1,12})\])?", split) if isinstance(split, str) else None
        if (
            not isinstance(path, str)
            or not isinstance(config, (str, type(None)))
            or parts is None
            or "data_files" in given
        ):
            return Setting(UNREAD, where, text)
        self.run.rows = int(parts[2] or 0)
        return Setting(path + (f"/{config}" if config else "") + (f":{parts[1]}" if parts[1] else ""), where)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _loader(call: ast.Call) -> str:
    """`AutoModelForCausalLM` of `AutoModelForCausalLM.from_pretrained(...)`."""
    return shown(call.func).split(".")[-2] if isinstance(call.func, ast.Attribute) else ""
