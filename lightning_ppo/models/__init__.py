"""Policy and critic: log-probs, values, micro-batches."""
