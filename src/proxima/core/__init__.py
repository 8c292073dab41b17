"""What everything else is built on: records, tensor operations, sampling, state-action pairs, errors."""
