"""Facts that catalog entries read: what the doctor's reader knows of a run besides its metrics. A fact that is not known is left out."""

from __future__ import annotations

from collections.abc import Mapping

FACTS: Mapping[str, str] = {
    "finished": "bool: every stage left its closing record",
    "ended_silently": "bool: a stage did not end, and nothing was recorded that says why",
    "last_line_cut": "bool: the last line of the metrics is half a line",
    "log.unreadable": "int: lines of the metrics that could not be read",
    "disk.full": "bool: the run ended because nothing more could be written",
    "out_of_memory": "bool: the run ended because memory ran out",
    "eval.pass_at_1": "float: of the newest evaluation, on the suite with the most items",
    "eval.parse_rate": "float: lowest share of parsed answers of the newest evaluation's suites",
    "eval.truncation_rate": "float: highest share of its answers cut by the token budget",
    "eval.error_rate": "float: highest share of its answers on which the verifier failed",
    "eval.n": "int: its fewest items",
    "eval.same_conditions": "bool: every suite was measured in the same way each time",
    "eval.template_differs": "bool: the evaluation rendered with another chat template than the training",
    "eval.decoding_disagrees": "bool: the change has another sign in another decoding mode",
    "eval.pass_at_k_falls": "bool: pass@1 rose while pass@k fell",
    "eval.picked_on_itself": "bool: the best of several checkpoints is reported on the items that picked it",
    "train.parse_rate": "float: share of training rollouts that could be parsed, over the last steps",
    "train.token_accuracy": "float: token accuracy over the last steps of supervised training",
    "teacher.tokenizer_differs": "bool: teacher and student number their tokens differently",
    "draft.acceptance_fell": "bool: speculative decoding accepts far less than its own baseline",
}
"""Name to type and meaning."""
