"""The examples for Slurm and Kubernetes, parsed: directives, objects, and every flag of their commands."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from proxima.cli import parse

SHELF = Path(__file__).parents[2] / "examples" / "cluster"
SLURM = SHELF / "slurm.sh"
SERVICE, JOB = yaml.safe_load_all((SHELF / "kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
DIRECTIVES = dict(
    line.removeprefix("#SBATCH --").split("=", 1)
    for line in SLURM.read_text().splitlines()
    if line.startswith("#SBATCH ")
)


def slurm_command():
    """What srun starts on each machine, its variables replaced as on a cluster."""
    text = SLURM.read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^srun .*$", text, re.MULTILINE)
    values = {"SLURM_JOB_NUM_NODES": DIRECTIVES["nodes"], "SLURM_JOB_ID": "17", "first": "node0"}
    words = shlex.split(re.sub(r"\$(\w+)", lambda found: values[found[1]], line))
    return words[words.index("torchrun") :]


@pytest.mark.parametrize("command", [slurm_command(), CONTAINER["command"]], ids=["Slurm", "Kubernetes"])
def test_every_flag_is_one_that_torchrun_and_train_take(command):
    program, *words = command
    assert program == "torchrun"
    torchrun = get_args_parser().parse_args(words)
    assert (torchrun.nnodes, torchrun.nproc_per_node, torchrun.max_restarts) == ("2", "8", 3)
    assert (torchrun.rdzv_backend, torchrun.rdzv_endpoint.rpartition(":")[2]) == ("c10d", "29500")
    assert (torchrun.module, torchrun.training_script) == (True, "proxima")
    train = parse(torchrun.training_script_args)
    assert type(train).__name__ == "Train"
    assert train.resume
    assert train.ppo.run_name == "tldr"  # restarts need it
    assert train.ppo.batch_size % 16 == 0


def test_slurm_starts_one_launcher_per_machine_with_the_gpus_it_asks_for():
    done = subprocess.run(["bash", "-n", str(SLURM)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert SLURM.read_text().startswith("#!/bin/bash\n")
    assert DIRECTIVES["ntasks-per-node"] == "1"
    torchrun = get_args_parser().parse_args(slurm_command()[1:])
    assert (torchrun.nnodes, torchrun.nproc_per_node) == (DIRECTIVES["nodes"], DIRECTIVES["gpus-per-node"])
    warned = int(re.fullmatch(r"TERM@(\d+)", DIRECTIVES["signal"])[1])
    assert torchrun.shutdown_timeout < warned
    body = SLURM.read_text().partition("set -euo pipefail")[0]
    assert not re.search(r"^(?!#)\S", body, re.MULTILINE)  # Slurm reads directives before the first command


def test_the_pods_of_the_job_find_each_other_and_share_a_disk():
    assert (SERVICE["kind"], JOB["kind"]) == ("Service", "Job")
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"] == {"job-name": JOB["metadata"]["name"]}
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    torchrun = get_args_parser().parse_args(CONTAINER["command"][1:])
    endpoint = f"{JOB['metadata']['name']}-0.{POD['subdomain']}"
    assert torchrun.rdzv_endpoint.partition(":")[0] == endpoint
    spec = JOB["spec"]
    assert spec["completionMode"] == "Indexed"
    assert str(spec["completions"]) == str(spec["parallelism"]) == torchrun.nnodes
    assert str(CONTAINER["resources"]["limits"]["nvidia.com/gpu"]) == torchrun.nproc_per_node
    assert torchrun.shutdown_timeout < POD["terminationGracePeriodSeconds"]
    mounted = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in POD["volumes"]}
    assert mounted["data"] == CONTAINER["workingDir"]
