"""What users of other trainers report, by the numbers of the list of public issues it was collected in: gaps are intended."""

from __future__ import annotations

from posttrain.doctor.catalog import users_loss, users_runs, users_tokens

ENTRIES = (*users_loss.ENTRIES, *users_tokens.ENTRIES, *users_runs.ENTRIES)
