"""The judges: pure functions from a task and a completion to a Score. No torch."""
