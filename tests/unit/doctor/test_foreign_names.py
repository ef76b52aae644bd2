"""Other trainers' names of metrics: what is translated, what only sounds alike, and who gets a name that two want."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.core.errors import RunError
from posttrain.doctor.names import EXACT, TRAPS, Ours, load_names, look_alike, translated
from posttrain.doctor.vocabulary import METRICS


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("reward", "reward_mean"),
        ("train/reward", "reward_mean"),
        ("completions/mean_length", "length"),
        ("train/completions/clipped_ratio", "truncated"),
        ("clip_ratio/region_mean", "clip_fraction"),
        ("frac_reward_zero_std", "zero_variance"),
        ("learning_rate", "lr"),
        ("rewards/format/mean", "channel_format_mean"),
        ("rewards/format/std", "channel_format_std"),
        ("rewards/chosen", "chosen_reward"),
        ("rewards/accuracies", "accuracy"),
        ("eval_reward", "heldout_mean"),
        ("eval/reward", "heldout_mean"),
        ("eval_completions/clipped_ratio", "heldout_truncated"),
        ("eval_loss", "heldout_loss"),
        ("critic/score/mean", "reward_mean"),
        ("actor/entropy", "entropy"),
        ("actor/pg_clipfrac", "clip_fraction"),
        ("response_length/clip_ratio", "truncated"),
        ("val-core/gsm8k/acc/mean@4", "heldout_mean"),
        ("reward/all/mean", "reward_mean"),
        ("optim/grad_norm", "grad_norm"),
        ("batch/solve_none", "all_wrong"),
        ("rollout/raw_reward", "reward_mean"),
        ("train/train_rollout_logprob_abs_diff", "mismatch_mean"),
        ("validation/accuracy", "heldout_mean"),
        ("timing/train/generation", "seconds.sample"),
        ("ppo_clip_ratio", "clip_fraction"),
    ],
)
def test_known_names(theirs: str, ours: str):
    assert translated([theirs])[theirs].name == ours


def test_a_ratio_of_clipped_completions_is_no_clip_fraction():
    found = translated(["completions/clipped_ratio", "clip_ratio/region_mean"])
    assert (found["completions/clipped_ratio"].name, found["clip_ratio/region_mean"].name) == ("truncated", "clip_fraction")


@pytest.mark.parametrize("trap", sorted(TRAPS))
def test_what_only_sounds_alike_keeps_its_own_name(trap: str):
    assert look_alike(f"train/{trap}") == look_alike(trap) == TRAPS[trap]
    assert translated([trap, f"train/{trap}"]) == {trap: Ours(trap), f"train/{trap}": Ours(f"train/{trap}")}


def test_units_are_converted():
    ours = translated(["perf/max_memory_allocated_gb"])["perf/max_memory_allocated_gb"]
    assert (ours.name, ours.of(2.0)) == ("seconds.peak_mib", 2048.0)
    assert Ours("mixed", -1.0, 1.0).of(0.25) == 0.75


def test_of_two_names_for_one_metric_the_first_of_the_tables_has_it_whatever_the_order():
    for order in (["critic/rewards/mean", "critic/score/mean"], ["critic/score/mean", "critic/rewards/mean"]):
        found = translated(order)
        assert found == {"critic/score/mean": Ours("reward_mean"), "critic/rewards/mean": Ours("critic/rewards/mean")}


def test_the_users_own_mapping_goes_first():
    found = translated(["reward", "my/acc"], {"My/Acc": "reward_mean"})
    assert found == {"my/acc": Ours("reward_mean"), "reward": Ours("reward")}


def test_every_translation_is_a_metric_that_exists():
    extra = {"margin", "seconds.step"}
    targets = {ours if isinstance(ours, str) else ours.name for table in EXACT.values() for ours in table.values()}
    assert targets - set(METRICS) <= extra
    assert not {name for table in EXACT.values() for name in table} & TRAPS.keys()
    assert all(name == name.lower() for table in EXACT.values() for name in (*table, *TRAPS))


def test_a_mapping_file(tmp_path: Path):
    (tmp_path / "n.yaml").write_text("my/acc: heldout_mean\n")
    (tmp_path / "n.json").write_text('{"a": "kl"}')
    assert load_names(tmp_path / "n.yaml") == {"my/acc": "heldout_mean"}
    assert load_names(tmp_path / "n.json") == {"a": "kl"}


@pytest.mark.parametrize("text", ["[1]", "a: 3", "a: ''", 'a: "x\\e[2J"', "{", ""])
def test_a_mapping_file_that_is_none(tmp_path: Path, text: str):
    (tmp_path / "n.yaml").write_text(text)
    with pytest.raises(RunError, match="write one line per metric") as caught:
        load_names(tmp_path / "n.yaml")
    assert str(caught.value).isprintable()
