"""Values in a Python script, without running it. In: a syntax tree. Out: literals, names that stand for one,
or `UNREAD`.

A name is read if it is set once, by a plain assignment; arithmetic is read only between numbers. Everything
else counts as computed.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable
from typing import TypeGuard

from proxima.tools.migrate.old_run import UNREAD, Setting

DEPTH = 40
MOST_ITEMS = 10_000  # in one value; a setting has fewer
LARGEST = 2**63
TYPES = ("float32", "bfloat16", "float16")

ARITHMETIC: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class Values:
    """What the names of a script stand for."""

    def __init__(self, tree: ast.Module):
        self.nodes = list(ast.walk(tree))
        self.parents = {id(child): node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.assigned: dict[str, list[ast.expr]] = {}
        for node in self.nodes:
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                self.assigned.setdefault(node.targets[0].id, []).append(node.value)
            elif (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.value is not None
            ):
                self.assigned.setdefault(node.target.id, []).append(node.value)
        stored = [
            node.id
            for node in self.nodes
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        ]
        stored += [node.arg for node in self.nodes if isinstance(node, ast.arg)]
        self.stored = Counter(stored)
        self.imported = {
            alias.asname or alias.name: alias.name
            for node in self.nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        self.fields: dict[str, Callable[[str], Setting | None]] = {}
        """What `name.field` is, for the names that hold a dataclass of settings."""

    def calls(self, *names: str) -> list[ast.Call]:
        """Calls of a function or class, in the order of the file."""
        found = [node for node in self.nodes if isinstance(node, ast.Call) and self.called(node) in names]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))

    def called(self, node: ast.expr) -> str:
        """The last name of what is called: `trl.experimental.ppo.PPOConfig(...)` is PPOConfig."""
        if not isinstance(node, ast.Call):
            return ""
        if isinstance(node.func, ast.Attribute):
            return node.func.attr
        return self.imported.get(node.func.id, node.func.id) if isinstance(node.func, ast.Name) else ""

    def only(self, name: str) -> ast.expr | None:
        """The expression that a name stands for, if it is set only once."""
        found = self.assigned.get(name, [])
        return found[0] if len(found) == 1 and self.stored[name] == 1 and name not in self.imported else None

    def is_conditional(self, node: ast.AST) -> bool:
        """Whether it might not run, or run more than once; `if __name__ == "__main__"` does not count."""
        while (above := self.parents.get(id(node))) is not None:
            if isinstance(above, (ast.For, ast.While, ast.Try, ast.IfExp)):
                return True
            if isinstance(above, ast.If) and not (
                isinstance(above.test, ast.Compare) and _is_main(above.test)
            ):
                return True
            node = above
        return False

    def setting(self, node: ast.expr) -> Setting:
        """The value of an expression, with its line; a field of a dataclass is what it was set to."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            held = self.fields.get(node.value.id, lambda _: None)(node.attr)
            if held is not None:
                return held
        value = self.value(node)
        return Setting(value, f"line {node.lineno}", "" if value is not UNREAD else shown(node))

    def value(self, node: ast.expr) -> object:
        """What an expression is. Each part is read once, and values above `MOST_ITEMS` are not read: names
        that refer to each other can stand for more than memory holds."""
        known: dict[int, object] = {}
        found = self._value(node, known, 0)
        return found if _size(found) <= MOST_ITEMS else UNREAD

    def _value(self, node: ast.expr, known: dict[int, object], depth: int) -> object:
        if depth > DEPTH:
            return UNREAD
        if id(node) not in known:
            known[id(node)] = UNREAD  # a name that refers to itself has no value
            known[id(node)] = self._read(node, known, depth + 1)
        return known[id(node)]

    def _read(self, node: ast.expr, known: dict[int, object], depth: int) -> object:
        match node:
            case ast.Constant(value=None | bool() | float() | str()):
                return node.value
            case ast.Constant(value=int(number)):
                return number if abs(number) < LARGEST else UNREAD
            case ast.List() | ast.Tuple() | ast.Set():
                return self._all([self._value(item, known, depth) for item in node.elts])
            case ast.Dict() if all(
                isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys
            ):
                values = self._all([self._value(item, known, depth) for item in node.values])
                if not isinstance(values, list):
                    return values
                names = [key.value for key in node.keys]  # type: ignore[union-attr]
                return dict(zip(names, values, strict=True))
            case ast.UnaryOp(op=ast.USub()):
                operand = self._value(node.operand, known, depth)
                return -operand if _is_number(operand) else UNREAD
            case ast.BinOp():
                return self._arithmetic(node, known, depth)
            case ast.Name(id=name):
                found = self.only(name)
                return UNREAD if found is None else self._value(found, known, depth)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in TYPES:
                return name
            case ast.Attribute(value=ast.Name(id=name), attr=field) if name in self.fields:
                held = self.fields[name](field)
                return UNREAD if held is None else held.value
        return UNREAD

    def _all(self, values: list[object]) -> object:
        return UNREAD if any(value is UNREAD for value in values) else values

    def _arithmetic(self, node: ast.BinOp, known: dict[int, object], depth: int) -> object:
        left = self._value(node.left, known, depth)
        right = self._value(node.right, known, depth)
        if type(node.op) not in ARITHMETIC or not (_is_number(left) and _is_number(right)):
            return UNREAD
        try:
            number = ARITHMETIC[type(node.op)](left, right)
        except (ArithmeticError, ValueError):
            return UNREAD
        return number if abs(number) < LARGEST else UNREAD


def _size(value: object) -> int:
    """Items in nested lists and dicts; the count stops once there are too many."""
    count = 0
    pending = [value]
    while pending and count <= MOST_ITEMS:
        item = pending.pop()
        count += 1
        if isinstance(item, (list, dict)):
            pending += item.values() if isinstance(item, dict) else item
    return count


def shown(node: ast.AST) -> str:
    """An expression in at most 60 characters."""
    try:
        text = " ".join(ast.unparse(node).split())
    except RecursionError:
        text = "..."
    return text if len(text) <= 60 else text[:57] + "..."


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_main(test: ast.Compare) -> bool:
    return isinstance(test.left, ast.Name) and test.left.id == "__name__"
