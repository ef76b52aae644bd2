"""Logs of other trainers as evidence: JSON lines, CSV, TensorBoard event files, W&B exports, trainer_state.json."""
