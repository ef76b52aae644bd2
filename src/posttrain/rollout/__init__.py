"""The pipeline: tasks to trajectories, groups, samples, batches."""
