"""Rollouts that are drawn while the trainer trains: bounded staleness, weights swapped in flight, exact replay, a closed account."""
