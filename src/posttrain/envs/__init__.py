"""The worlds: where tasks come from, what their gold answers are, and data rows. No torch."""
