"""The nouns every other package speaks: tasks, messages, trajectories, samples, metrics, configs, seeds, digests, errors. No torch."""
