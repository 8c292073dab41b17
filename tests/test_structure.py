"""The house rules: imports point one way, formulas know no config, importing does no work, nothing is pickled."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "proxima"

# Each level may import from itself and from levels before it.
LEVELS = [
    {
        "errors",
        "files",
        "text",
        "threads",
        "hub",
        "glossary",
        "types",
        "ops",
        "sampling",
        "encoding",
        "pairs",
        "config",
        "processes",
    },
    {"token_attribution", "reward_kl", "advantage", "training", "metrics", "guards"},
    {"engine"},
    {"models", "tiny", "data", "tracking", "checkpoint", "environment", "run_folder", "web", "runs"},
    {"report"},
    {"base_setup"},
    {"experience_buffer", "evaluator", "rewards", "rollouts"},
    {"ppo_trainer"},
    {"stages", "export", "evaluation", "bench", "doctor", "scaling", "migrate"},
    {"label", "comparison"},
    {"studio"},
    {"world"},
    {"demo"},
    {"commands"},
    {"cli", "__main__"},
]
FORMULAS = (
    "ops",
    "sampling",
    "encoding",
    "pairs",
    "types",
    "token_attribution",
    "reward_kl",
    "advantage",
    "training",
    "metrics",
    "guards",
)
LEVEL = {name: number for number, level in enumerate(LEVELS) for name in level}
FILES = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def own_parts(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("proxima.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    assert part(path) in LEVEL, f"{part(path)} has no place in LEVELS"
    later = {name for name in own_parts(path) if LEVEL[name] > LEVEL[part(path)]}
    assert not later


@pytest.mark.parametrize("path", [path for path in FILES if part(path) in FORMULAS], ids=lambda path: path.stem)
def test_formulas_know_no_config_no_model_and_no_logging(path):
    assert not own_parts(path) & {"config", "models", "base_setup", "tracking", "run_folder"}
    assert not {name.split(".")[0] for name in imports(path)} & {"transformers", "peft", "logging"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_is_pickled_or_evaluated(path):
    tree = ast.parse(path.read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"eval", "exec", "torch.load", "torch.save", "pickle.load", "pickle.loads", "yaml.load"}
    assert "pickle" not in imports(path)


def test_nothing_that_trains_can_see_the_gold_score():
    code = (
        "import sys\n"
        "import proxima.ppo_trainer, proxima.stages, proxima.evaluator, proxima.cli\n"
        "assert not [name for name in sys.modules if name.startswith(('proxima.world', 'proxima.demo'))]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""})
    users = {part(path) for path in FILES if "world" in own_parts(path)}
    assert users == {"world", "demo", "commands"}  # `proxima data sample` writes its posts


def test_every_file_begins_with_its_purpose():
    assert [str(path) for path in SOURCE.rglob("*.py") if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_importing_does_no_work_and_needs_no_optional_package():
    code = (
        "import sys\n"
        "for name in 'datasets tyro pandas tensorboard wandb trackio fastapi uvicorn httpx tenacity vllm'.split():\n"
        "    sys.modules[name] = None\n"
        "import proxima\n"
        "assert 'torch' not in sys.modules\n"
        "import proxima.ppo_trainer, proxima.cli\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert all(getattr(proxima, name) for name in proxima.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""})


def test_public_names_are_the_same_for_type_checkers_and_at_run_time():
    import proxima

    tree = ast.parse((SOURCE / "__init__.py").read_text())
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert named - {"annotations", "TYPE_CHECKING", "Any", "shorten_waits"} == set(proxima.__all__)


def test_ppo_step_reads_as_the_road():
    tree = ast.parse((SOURCE / "ppo_trainer" / "ppo_trainer.py").read_text())
    step = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "ppo_step")
    calls = [
        node.func.attr
        for node in sorted((n for n in ast.walk(step) if isinstance(n, ast.Call)), key=lambda n: n.lineno)
        if isinstance(node.func, ast.Attribute)
    ]
    road = [
        "generate_sequences",
        "score_pairs",
        "add_kl_to_sa_pairs",
        "adjust_rewards_with_kl",
        "add_values_to_sa_pairs",
        "add_advantages",
        "store",
        "update_models",
    ]
    assert [name for name in calls if name in road] == road
