"""The evidence: intervals, comparisons, pass@k, budgets, grades, lags and trends. Pure functions over numbers; no torch."""
