"""The files around the package say what is true: workflows, issue forms, the citation, the Dockerfile."""

import re
import shlex
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import proxima

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [item.rpartition(" ")[2] for item in PROJECT["classifiers"] if "Python :: 3." in item]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCKERFILE = (ROOT / "Dockerfile").read_text()


TOLERANCE = re.compile(r"LOGPROB_ROUNDING|\brounding\(|assert_close\(|approx\(|allclose\(|\b[ar]tol=")
NOT_UNDER_OTHER_ROUNDING = {
    "they run where a GPU, an engine, TRL, a browser or several processes are": (
        "gpu/* engines/* peer/* pages/test_replay_browser.py pages/test_studio_browser.py "
        "runtime/test_processes.py tools/test_migrate_trl.py"
    ),
    "they compare plain floats of Python, which round alike everywhere, or bytes and seconds": (
        "base_setup/test_learning_rates.py base_setup/test_micro_batches.py config/test_options.py "
        "docs/test_study_active_labels.py docs/test_tldr_real.py pages/* ppo_trainer/test_resume.py "
        "rewards/test_verifiers.py runs/test_guards.py tools/test_bench.py tools/test_doctor.py "
        "tools/test_migrate.py tools/test_scaling.py world/test_world.py"
    ),
    "they compare a run with its own records, or a few scores of it": (
        "cli/test_cli.py cli/test_refresh.py docs/test_instructions.py evaluator/test_best_of_n.py "
        "rewards/test_reward_http.py tools/test_peer_tools.py"
    ),
    "for their time: their passes are those of runtime/test_engine.py and models, in other settings": (
        "base_setup/test_gguf.py base_setup/test_nf4_loading.py base_setup/test_smollm2.py environments/test_episodes.py "
        "ppo_trainer/test_reward_units.py rewards/test_foreign_rewards.py "
        "runtime/test_experts.py runtime/test_rollouts.py"
    ),
}
"""Test files with tolerances that `make test-rounding` leaves out, by the reason."""


def jobs(path):
    return yaml.safe_load(path.read_text())["jobs"]


def made(job):
    """The targets that a job makes, those of its matrix too."""
    lines = [step["run"] for step in job["steps"] if step.get("run", "").startswith("make ")]
    names = {shlex.split(line)[1] for line in lines}
    return (names - {"$TARGET"}) | set(job.get("strategy", {}).get("matrix", {}).get("target", []))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_makes_targets_that_exist_with_pinned_actions_and_few_rights(path):
    found = yaml.safe_load(path.read_text())
    assert found["permissions"] == {"contents": "read"}
    for job in found["jobs"].values():
        assert made(job) <= TARGETS
        assert job["timeout-minutes"] > 0
        assert set(job.get("permissions", {})) <= {"id-token", "pages"}
    uses = re.findall(r"uses: (.*)", path.read_text())
    assert uses
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line) for line in uses), uses


def test_the_workflows_run_what_ci_runs_on_the_first_and_the_last_python():
    tests = jobs(ROOT / ".github" / "workflows" / "tests.yml")
    lines = re.findall(r"^(?:timed|three_at_a_time) (.*)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    here = set(" ".join(lines).split())
    vllm = {"test-engines"}  # its lock names torch's CPU wheels, which are not on PyPI
    assert set().union(*map(made, tests.values())) == here - vllm
    versions = tests["test"]["strategy"]["matrix"]["python"]
    assert len(versions) == 3
    assert {PYTHONS[0], PYTHONS[-1]} < set(versions) < set(PYTHONS)
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def rounded_files():
    """What `make test-rounding` runs, relative to tests/."""
    lists = re.findall(r"^(?:NUMERIC\w*) := (.*)$", made_variables(), re.MULTILINE)
    named = [ROOT / path for line in lists for path in line.split()]
    assert all(path.exists() for path in named), named
    files = [file for path in named for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    assert len(files) == len(set(files))
    return {file.relative_to(ROOT / "tests").as_posix() for file in files}


def made_variables():
    command = ["make", "--print-data-base", "--question", "clean"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_tests_with_tolerances_run_under_other_rounding_or_say_why_not():
    files = {
        file.relative_to(ROOT / "tests").as_posix(): file for file in (ROOT / "tests").rglob("test_*.py")
    }
    compared = {name for name, file in files.items() if TOLERANCE.search(file.read_text())}
    compared.discard("docs/test_project_files.py")
    patterns = " ".join(NOT_UNDER_OTHER_ROUNDING.values()).split()
    left_out = {name for name in compared if any(fnmatch(name, pattern) for pattern in patterns)}
    rounded = rounded_files()
    assert compared - left_out <= rounded, compared - left_out - rounded
    assert not left_out & rounded
    idle = [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in compared)]
    assert not idle, f"{idle} have no tolerances, or are gone"


def test_the_pins_are_audited_every_week_and_before_a_release():
    audit = yaml.safe_load((ROOT / ".github" / "workflows" / "audit.yml").read_text())
    assert audit[True]["schedule"]  # YAML reads the key `on` as true
    assert "constraints.txt" in audit[True]["push"]["paths"]
    assert made(audit["jobs"]["audit"]) == {"audit"}
    release = jobs(ROOT / ".github" / "workflows" / "release.yml")
    assert any("audit" in made(job) for job in release.values())
    recipe = re.search(r"^audit:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
    assert "pip-audit" in recipe
    assert "--requirement constraints.txt" in recipe


def test_a_release_is_the_distribution_under_its_version():
    assert jobs(ROOT / ".github" / "workflows" / "release.yml")["publish"]["environment"] == "pypi"
    assert re.search(
        rf'^version = "{PROJECT["version"]}"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"] == proxima.__version__
    assert citation["license"] == PROJECT["license"]


IN_A_CITATION = """abstract authors cff-version commit contact date-released doi identifiers keywords license license-url
    message preferred-citation references repository repository-artifact repository-code title type url version"""
OF_AN_AUTHOR = """address affiliation alias city country email family-names given-names name name-particle name-suffix orcid
    website"""
"""Keys of the Citation File Format, schema 1.2.0."""


def test_the_citation_has_the_keys_of_its_format():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"authors", "cff-version", "message", "title"} <= set(citation) <= set(IN_A_CITATION.split())
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] in ("software", "dataset")
    for author in citation["authors"]:
        assert set(author) <= set(OF_AN_AUTHOR.split())
        assert {"name", "family-names"} & set(author)
    assert len(set(citation["keywords"])) == len(citation["keywords"])


def test_workflows_start_on_something_and_their_jobs_wait_for_jobs_that_exist():
    for path in WORKFLOWS:
        found = yaml.safe_load(path.read_text())
        assert {"push", "pull_request", "schedule"} >= set(found[True]) != set()  # YAML reads `on` as true
        for job in found["jobs"].values():
            assert {job["needs"]} <= set(found["jobs"]) if "needs" in job else True
            assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    bot = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())
    assert bot["version"] == 2
    for update in bot["updates"]:
        assert {"package-ecosystem", "directory", "schedule"} <= set(update)


def test_files_that_make_ci_and_the_dockerfile_name_exist():
    whole = re.compile(
        r"(?:tools|tests|examples|docs|src)/[\w./-]+\.(?:py|sh|json|yaml)|[a-z.]+\.(?:txt|toml)"
    )
    for name in ("Makefile", ".ci/run", "Dockerfile"):
        named = set(whole.findall((ROOT / name).read_text()))
        missing = [
            path for path in named if not any((folder / path).is_file() for folder in (ROOT, ROOT / "tests"))
        ]
        assert not missing, f"{name}: {missing}"


FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def test_an_issue_form_is_one_that_github_takes():
    for name in ("bug", "idea"):
        form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
        assert (
            {"name", "description", "body"} <= set(form) <= {"name", "description", "body", "labels", "title"}
        )
        for item in form["body"]:
            assert item["type"] in FIELDS
            needed = "value" if item["type"] == "markdown" else "label"
            assert item["attributes"][needed]
            assert set(item) <= {"type", "id", "attributes", "validations"}
            assert set(item.get("validations", {})) <= {"required"}
            assert re.fullmatch(r"[\w-]+", item.get("id", "none"))


def test_the_issue_forms_ask_for_what_a_run_folder_has():
    forms = {
        path.stem: yaml.safe_load(path.read_text())
        for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")
    }
    assert set(forms) == {"bug", "idea", "config"}
    for form in (forms["bug"], forms["idea"]):
        asked = [item["id"] for item in form["body"] if item["type"] != "markdown"]
        assert len(set(asked)) == len(asked) > 0
    [run] = [item for item in forms["bug"]["body"] if item.get("id") == "run"]
    files = re.findall(r"`(\w+\.\w+)`", run["attributes"]["description"])
    assert {"config.yaml", "environment.json", "metrics.jsonl"} <= set(files)
    [bundle] = [item for item in forms["bug"]["body"] if item.get("id") == "bundle"]
    [command] = re.findall(r"`proxima (replay .*?)`", bundle["attributes"]["description"])
    assert shlex.split(command)[2:] == ["--share", "bundle.safetensors"]
    assert "`--redact`" in bundle["attributes"]["description"]
    writer = (ROOT / "src" / "proxima" / "runs" / "run_writer.py").read_text()
    assert all(name in writer for name in files if name != "report.html")


def test_targets_and_files_that_contributing_and_security_name_exist():
    for name in ("CONTRIBUTING.md", "SECURITY.md"):
        text = (ROOT / name).read_text()
        assert set(re.findall(r"`make ([\w-]+)`", text)) <= TARGETS
        for path in re.findall(r"`([\w./-]+\.(?:py|toml|md))`|\]\(([\w./-]+)\)", text):
            assert (ROOT / "".join(path)).is_file(), path


def test_the_images_are_made_of_files_that_docker_is_given_and_run_as_nobody_special():
    given = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists()
            assert any(fnmatch(name, kept) for kept in given), name
    images = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[2:]
    assert [image.split()[2] for image in images] == ["cpu", "gpu"]
    for image in images:
        assert "--constraint constraints.txt ." in image
        assert re.findall(r"^USER (.*)$", image, re.MULTILINE) == ["1000"]
        assert 'ENTRYPOINT ["proxima"]' in image
