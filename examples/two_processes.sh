# bash examples/two_processes.sh
# One process, then two (on GPUs: one each): the same settings, the same results up to rounding.
set -euo pipefail
proxima train --config examples/python_reward.yaml --run-name one
torchrun --standalone --nproc_per_node=2 -m proxima train --config examples/python_reward.yaml --run-name two
proxima compare runs/one runs/two
