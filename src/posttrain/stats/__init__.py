"""The evidence: intervals, pass@k and paired tests. Pure functions over numbers; no torch."""
