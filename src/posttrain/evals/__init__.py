"""Evaluation under frozen conditions: suites, the runner, records that carry their evidence, and comparisons that refuse mismatches."""
