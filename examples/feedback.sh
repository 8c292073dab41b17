# bash examples/feedback.sh
# From preferences to an evaluated policy, with the sample data and the model in the package; small limits, so it takes a minute.
set -euo pipefail
proxima data sample my-data
proxima reward --config my-data/reward.yaml --data my-data/preferences.jsonl --limit 160 --run-name reward
proxima train --config my-data/ppo.yaml --data my-data/prompts.jsonl --limit 64 --rewards runs/reward --run-name ppo
proxima eval runs/ppo --data my-data/held_out.jsonl --limit 20 --show 1
proxima report runs/ppo
