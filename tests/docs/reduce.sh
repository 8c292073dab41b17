# Of the files of `proxima data sample`, in the folder $1: a part of the rows, and smaller batches.
set -e
cd "$1"
for rows in prompts:64 held_out:12 demonstrations:96 ratings:96 preferences:192; do
    sed -i "${rows#*:}q" "${rows%:*}.jsonl"
done
sed -i -E 's/^batch_size: 64$/batch_size: 16/; s/^minibatch_size: 32$/minibatch_size: 8/' ppo.yaml
sed -i -E 's/^batch_size: 32$/batch_size: 16/' reward.yaml
