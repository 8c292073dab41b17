#!/bin/bash
# sbatch examples/cluster/slurm.sh
# not run: needs a Slurm cluster; the directives and the command are parsed by test
# Two machines with eight GPUs each. Submit it from a folder on a disk that all machines share: runs/ is written there. Slurm sends
# SIGTERM before the time is up, so the run ends after its step with a checkpoint; submitting the script again resumes it
# (`--resume` begins where there is nothing to resume).
#SBATCH --job-name=proxima
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --output=slurm-%j.txt
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=8
srun --kill-on-bad-exit=1 torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node=8 --max-restarts=3 --shutdown-timeout=240 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:29500" \
    -m proxima train --model-name Qwen/Qwen3-0.6B-Base --data trl-lib/tldr --rewards runs/reward --batch-size 512 \
    --max-new-tokens 53 --run-name tldr --resume
