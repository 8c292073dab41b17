"""The house rules: imports point one way, formulas know no config, importing does no work."""

import ast
import importlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from proxima.core.lazy_exports import exported_names

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "proxima"

# Each level may import from itself and from levels before it. A room is named whole, or by its parts where
# these differ.
FORMULA_LEVEL = {
    "token_attribution",
    "reward_kl",
    "advantage",
    "training",
    "evaluator.diversity",
    "runs.metrics",
    "runs.value_calibration",
    "runs.evidence",
    "runs.guards",
}
LEVELS = [
    {
        "core",
        "config",
        "runs.glossary",
        "runs.metric_declarations",
        "runtime",
        "runtime.threads",
        "runtime.distributed",
    },
    FORMULA_LEVEL,
    {"runtime.engine"},
    {"models", "data", "pages", "pages.web", "runs", "world.tiny_models"},
    {"pages.report"},
    {"base_setup"},
    {"experience_buffer", "evaluator", "rewards", "environments", "runtime.vllm"},
    {"ppo_trainer", "evaluator.held_out", "evaluator.judges"},
    {"finetuning", "tools", "evaluator.finished_run"},
    {"pages.label", "pages.comparison"},
    {"pages.studio"},
    {"world"},
    {"world.demo"},
    {"cli", "__main__"},
]
FORMULAS = ("core.ops", "core.sampling", "core.encoding", "core.pairs", "core.types", *FORMULA_LEVEL)
ROOMS = {
    *(
        "config",
        "base_setup",
        "models",
        "token_attribution",
        "reward_kl",
        "advantage",
        "training",
        "experience_buffer",
    ),
    *(
        "ppo_trainer",
        "evaluator",
        "core",
        "runtime",
        "data",
        "rewards",
        "environments",
        "finetuning",
        "runs",
        "pages",
        "tools",
        "world",
        "cli",
    ),
}
LEVEL = {name: number for number, level in enumerate(LEVELS) for name in level}
FILES = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]


def dotted(path: Path) -> str:
    """`runtime.engine.decoder` for src/proxima/runtime/engine/decoder.py."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def part(module: str, parts=LEVEL) -> str:
    """The longest name among these that a module is, or lies in."""
    words = module.split(".")
    names = [".".join(words[:end]) for end in range(len(words), 0, -1)]
    return next((name for name in names if name in parts), "")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


MODULES = {dotted(path) for path in FILES}
EXPORTS = {
    f"proxima.{dotted(path)}": exported_names(path.read_bytes())
    for path in FILES
    if path.name == "__init__.py" and "lazy_exports(__name__" in path.read_text()
}
"""The names that each lazy package exports, and the modules they are from."""


def home(module: str, name: str) -> str:
    """The module that a name comes from; importing a lazy package imports nothing else."""
    while name in EXPORTS.get(module, {}):
        module = EXPORTS[module][name]
    return module


@cache
def imports(path: Path) -> set[str]:
    found = set()
    exported = exported_names(path.read_bytes()) if f"proxima.{dotted(path)}" in EXPORTS else {}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.name for alias in node.names if exported.get(alias.name) != node.module}
            found |= {home(node.module, name) for name in names}
            found |= {f"{node.module}.{name}" for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def own_modules(path: Path) -> set[str]:
    """What of this package a file imports."""
    names = {name.removeprefix("proxima.") for name in imports(path) if name.startswith("proxima.")}
    return {name for name in names if name in MODULES}


def test_every_room_is_on_the_map():
    assert {path.name for path in SOURCE.iterdir() if any(path.rglob("*.py"))} == ROOMS
    assert {path.stem for path in SOURCE.glob("*.py")} == {"__init__", "__main__"}


def test_the_tests_show_the_same_map():
    """A folder of tests for each folder of the package; what is beside them is a suite or a helper."""
    suites = {"docs", "engines", "families", "gpu", "install", "peer"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))}
    assert folders - suites == ROOMS


def test_a_module_name_says_what_it_holds_without_its_folder():
    names = [path.stem for path in FILES if path.stem != "__init__"]
    assert {name for name in names if names.count(name) > 1} == set()


def test_a_class_name_is_used_once():
    names = [node.name for path in FILES for node in nodes(path) if isinstance(node, ast.ClassDef)]
    assert {name for name in names if names.count(name) > 1} == set()


def test_a_function_fits_on_a_screen():
    functions = [
        (dotted(path), node)
        for path in FILES
        if "kernels" not in path.parts
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [(path, node.name) for path, node in functions if node.end_lineno - node.lineno >= 50] == []


def test_lines_of_pages_are_short_too():
    """Those of Python are the linter's concern."""
    files = [path for kind in ("js", "css", "html") for path in SOURCE.rglob(f"*.{kind}")]
    assert len(files) > 20
    long = [path.name for path in files if max(map(len, path.read_text("utf-8").splitlines())) > 110]
    assert not long


def test_three_values_that_are_computed_are_not_assigned_in_one_line():
    """Names beside names can be read at a glance; calls and subscripts cannot."""

    def is_plain(value):
        named = isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name)
        return named or isinstance(value, ast.Constant | ast.Name)

    found = [
        f"{dotted(path)}: {ast.unparse(node)}"
        for path in FILES
        if "kernels" not in path.parts
        for node in nodes(path)
        if isinstance(node, ast.Assign)
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        if len(node.value.elts) > 2 and not all(map(is_plain, node.value.elts))
    ]
    assert found == []


ANY = {
    # values whose type only a file, a peer or a caller decides: what `json` and PyYAML return, and ASGI hands on
    "core/json_record.py": 2,
    "core/pairs/sa_pairs.py": 1,
    "base_setup/gguf_files.py": 1,
    "config/settings_base.py": 5,
    "pages/label/agreement.py": 1,
    "pages/web/access_guard.py": 1,
    "rewards/reward_server.py": 1,
    "runtime/distributed/process_group.py": 2,
    # `typing.Any` as a value: the annotation that `get_type_hints` gives
    "rewards/reward_options.py": 5,
    # what transformers returns depends on its options, and attributes on the architecture
    "core/tokenizer.py": 2,
    "runtime/engine/architecture.py": 2,
    "runtime/engine/families.py": 1,
    # arguments passed through to tenacity, uvicorn and torch's checkpointing
    "core/retries.py": 1,
    "models/backbone.py": 2,
    "pages/web/connections.py": 2,
    "ppo_trainer/model_trainer.py": 1,
    # torch: a module's table of modules, the context of an autograd function, compiled functions
    "models/passes.py": 1,
    "runtime/engine/experts.py": 3,
    "runtime/engine/kernels/attention_kernels.py": 5,
    "runtime/engine/kernels/head_kernels.py": 3,
    "runtime/engine/kernels/norm_kernels.py": 3,
    "runtime/engine/layer_functions.py": 3,
    "runtime/engine/lora_products.py": 4,
    "runtime/engine/packed_attention.py": 4,
    "runtime/engine/vocabulary.py": 6,
    # what a worker's function or a policy's program takes and returns, math-verify and reasoning-gym
    "rewards/code_program.py": 5,
    "rewards/code_tests.py": 5,
    "rewards/graders.py": 2,
    "rewards/verifiers.py": 2,
    "rewards/worker_child.py": 9,
    "rewards/worker_process.py": 2,
    # objects of TRL, and JSON, in an environment that has no Proxima
    "tools/bench/plain_generation.py": 1,
    "tools/bench/trl_step.py": 21,
    # a trainer of either kind of example
    "tools/bench/finetuning_case.py": 4,
}
"""How often a file says `Any`, by the library that leaves no better type."""


def test_any_stands_only_where_a_library_leaves_no_better_type():
    """Use a true type, `object` for what is only passed on, `Record` or `RecordView` for JSON. Where a
    library leaves none of these, raise the file's number above; where one goes, lower it."""
    found = {}
    for path in FILES:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        count = sum("Any" in (getattr(node, "id", ""), getattr(node, "attr", "")) for node in nodes)
        if count:
            found[path.relative_to(SOURCE).as_posix()] = count
    assert found == ANY


def test_from_outside_a_package_only_what_it_exports_is_imported():
    """`core` is a library of small modules, each for itself."""
    deep = set()
    for path in FILES:
        inside = ["proxima", *path.relative_to(SOURCE).parts[:-1]]
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("proxima."):
                *package, _ = node.module.split(".")
                is_module = (
                    node.module.removeprefix("proxima.") in MODULES
                    and (SOURCE / "/".join(node.module.split(".")[1:])).with_suffix(".py").exists()
                )
                if is_module and package[1:2] != ["core"] and inside[: len(package)] != package:
                    deep.add((dotted(path), node.module))
    assert deep == set()


def test_what_is_imported_from_a_package_is_what_it_exports():
    """A type checker cannot tell: a package with `__getattr__` has any name."""
    missing = {
        (dotted(path), f"{node.module}.{alias.name}")
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module in EXPORTS
        for alias in node.names
        if alias.name not in EXPORTS[node.module]
    }
    assert {each for each in missing if each[1].removeprefix("proxima.") not in MODULES} == set()


def test_imports_point_one_way():
    """(file, what it imports from a later level)"""
    levels = {path: LEVEL[part(dotted(path))] for path in FILES}
    upward = {
        (dotted(path), name)
        for path in FILES
        for name in own_modules(path)
        if LEVEL[part(name)] > levels[path]
    }
    assert upward == set()


def test_formulas_know_no_config_no_model_and_no_logging():
    barred = ("config", "models", "base_setup", "runs.tracking", "runs.run_writer")
    formulas = [path for path in FILES if part(dotted(path), FORMULAS)]
    own = {(dotted(path), name) for path in formulas for name in own_modules(path) if part(name, barred)}
    assert own == set()
    outside = {(dotted(path), name.split(".")[0]) for path in formulas for name in imports(path)}
    assert {each for each in outside if each[1] in ("transformers", "peft", "logging")} == set()


OF_ACCELERATORS = {
    "is_available",
    "synchronize",
    "empty_cache",
    "set_device",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
}
"""Functions of `torch.cuda` that `torch.accelerator` has for every accelerator."""
NVIDIA_ALONE = [
    "cli.bench_command",
    "runs.environment",
    "tools.bench.bench_case",
    "tools.bench.beside",
    "tools.bench.finetuning_case",
    "tools.bench.generation_peers",
    "tools.bench.hardware_floor",
    "tools.bench.plain_generation",
    "tools.bench.random_model",
    "tools.bench.trl_step",
]
"""What measures or describes NVIDIA's GPUs asks whether there is one."""


def test_cuda_is_not_named_where_torchs_accelerator_interface_will_do():
    called = re.compile(r"torch\.cuda\.(\w+)\(")
    found = {(dotted(path), name) for path in FILES for name in called.findall(path.read_text())}
    named = {(module, name) for module, name in found if name in OF_ACCELERATORS}
    assert named == {(module, "is_available") for module in NVIDIA_ALONE}


FRESH = """
import importlib, json, os, signal, sys

for module, names in json.loads(sys.argv.pop(1)).items():
    for name in names:
        delattr(sys.modules[module], name)
optional = "datasets tyro pandas tensorboard wandb trackio fastapi uvicorn httpx tenacity vllm".split()
sys.modules |= dict.fromkeys(["fcntl", "grp", "pwd", *optional])
import proxima
found = {"torch is imported with the package": "torch" in sys.modules}
import proxima.ppo_trainer, proxima.finetuning, proxima.evaluator, proxima.cli
import torch
found["world"] = [name for name in sys.modules if name.startswith("proxima.world")]
found["CUDA is initialised"] = torch.cuda.is_initialized()
found["missing"] = [name for name in proxima.__all__ if not getattr(proxima, name)]
for name in optional:
    del sys.modules[name]
for name in sys.argv[1:]:
    importlib.import_module(name)
from proxima.core.moved_modules import new_name
found["old paths"] = [name for name in sys.modules if new_name(name)]
print(json.dumps(found))
"""
"""Imports the package without its optional packages, then each module; always without what only POSIX has."""
POSIX = {  # without what libraries themselves need on POSIX
    "os": ["fork", "forkpty", "getpgid", "geteuid", "killpg", "setsid", "waitid"],
    "signal": ["SIGALRM", "SIGCHLD", "SIGKILL", "SIGSTOP", "SIGUSR1", "alarm", "setitimer", "sigwait"],
}


@pytest.fixture(scope="module")
def fresh():
    """What a new process finds that imports the package, then all of its modules but kernels, which need
    Triton."""
    names = sorted(f"proxima.{name}" for name in MODULES if "kernels" not in name and name != "__main__")
    done = subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps(POSIX), *names],
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
        stdout=subprocess.PIPE,
    )
    return json.loads(done.stdout)


def test_nothing_that_trains_can_see_the_gold_score(fresh):
    assert fresh["world"] == []
    users = {
        dotted(path).split(".")[0]
        for path in FILES
        if any(part(name, ("world",)) for name in own_modules(path))
    }
    assert users == {"world", "cli"}  # `proxima data sample` writes its posts


def test_every_file_begins_with_its_purpose():
    assert [str(path) for path in SOURCE.rglob("*.py") if not ast.get_docstring(tree(path))] == []


def test_importing_does_no_work_and_needs_no_optional_package_no_file_locks_and_no_fork(fresh):
    """Not every system has locks and fork."""
    assert not fresh["torch is imported with the package"]
    assert not fresh["CUDA is initialised"]
    assert fresh["missing"] == []


def test_nothing_of_this_package_uses_an_old_path(fresh):
    assert fresh["old paths"] == []


def test_training_loads_no_table_no_dataset_and_no_web_server(tmp_path):
    """These take 200 of the installation's megabytes; a run on text files loads none of them."""
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    code = (
        "import sys\n"
        "from proxima.cli import main\n"
        "words = 'train --model-name embedded --data prompts.txt --rewards length_band,low=5,high=20 '\n"
        "words += '--batch-size 2 --minibatch-size 2 --max-new-tokens 2 --device cpu'\n"
        "sys.argv = ['proxima', *words.split()]\n"
        "assert not main()\n"
        "barred = {'datasets', 'pandas', 'pyarrow', 'fastapi', 'uvicorn', 'pydantic', 'httpx', 'requests'}\n"
        "assert 'torch' in sys.modules and not barred & set(sys.modules), barred & set(sys.modules)\n"
    )
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)


@pytest.mark.parametrize("package", ["proxima", *sorted(EXPORTS)])
def test_what_a_package_exports_is_there(package):
    if package.endswith("kernels"):
        pytest.importorskip("triton")
    module = importlib.import_module(package)
    for name in module.__all__:
        found = getattr(module, name)
        assert not isinstance(found, ModuleType), f"a module of {package} hides its {name}"
    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_this_name'"):
        module.nothing_of_this_name  # noqa: B018


def test_ppo_step_reads_as_the_pipeline():
    tree = ast.parse((SOURCE / "ppo_trainer" / "ppo_trainer.py").read_text())
    step = next(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "ppo_step"
    )
    calls = [
        node.func.attr
        for node in sorted((n for n in ast.walk(step) if isinstance(n, ast.Call)), key=lambda n: n.lineno)
        if isinstance(node.func, ast.Attribute)
    ]
    pipeline = [
        "generate_sequences",
        "score_pairs",
        "add_kl_to_sa_pairs",
        "adjust_rewards_with_kl",
        "add_values_to_sa_pairs",
        "estimate_advantages",
        "store",
        "update_models",
    ]
    assert [name for name in calls if name in pipeline] == pipeline
