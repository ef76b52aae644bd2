"""One optimizer step: schedule, clip, divergence, metrics, and a restored trainer that continues bit for bit."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.core.metrics import Mean
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import Owner
from posttrain.engine.memory import peak_mib
from posttrain.engine.processes import Ranks
from posttrain.engine.scoring import score
from posttrain.engine.trainer import Diverged, LocalTrainer, Optim
from posttrain.engine.weights import weights_digest
from posttrain.loops.sft import imitation
from posttrain.rollout.pack import Packing, pack


def batches(toy, width: int = 256):
    rows = [toy.row((1, 5, 9), (20, 21, 2), "a"), toy.row((1, 6), (22, 2), "b")]
    return pack(rows, Packing(row_tokens=width, micro_tokens=width))


def trainer_of(model, total: int = 10, **optim) -> LocalTrainer:
    return LocalTrainer(model, Optim(**({"lr": 1e-2, "schedule": "constant", "warmup": 0.0} | optim)), total, Ranks())


def rates(total: int, **optim) -> list[float]:
    settings = Optim.model_validate({"lr": 1.0} | optim)
    return [settings.rate(step, total) for step in range(total)]


def test_linear_schedule_by_hand():
    # warm-up over 2 of 10 steps, then from 1 at step 2 to 0 at step 9 in sevenths
    expected = [0.5, 1.0, 1.0, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7, 0.0]
    assert rates(10, schedule="linear", warmup=0.2) == pytest.approx(expected)


def test_cosine_schedule_by_hand():
    # no warm-up, 5 steps: (1 + cos(k pi / 4)) / 2
    assert rates(5, schedule="cosine", warmup=0.0) == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("total", [2, 3, 10, 37])
def test_last_rate_is_the_end_rate(schedule, total):
    assert rates(total, schedule=schedule, warmup=0.1, end=0.25)[-1] == pytest.approx(0.25)
    assert max(rates(total, schedule=schedule, warmup=0.1)) == pytest.approx(1.0)


def test_constant_schedule_ignores_the_end():
    assert rates(4, schedule="constant", warmup=0.25, end=0.0) == [1.0, 1.0, 1.0, 1.0]
    assert rates(4, schedule="constant", warmup=0.5) == [0.5, 1.0, 1.0, 1.0]


def test_short_runs_reach_the_full_rate():
    assert rates(1, schedule="linear", warmup=0.9) == [1.0]
    assert rates(2, schedule="linear", warmup=0.9) == [1.0, 1.0]


def test_zero_steps_are_refused(toy):
    with pytest.raises(ConfigError, match="0 optimizer steps"):
        trainer_of(toy.model(), total=0)


def test_the_schedule_reaches_the_optimizer(toy):
    trainer = trainer_of(toy.model(), total=3, schedule="linear")
    seen = [trainer.step(batches(toy), imitation(5))["lr"].read() for _ in range(3)]
    assert seen == pytest.approx([1e-2, 5e-3, 0.0])
    assert trainer.version == 3


def test_a_step_at_rate_zero_changes_nothing(toy):
    model = toy.model()
    trainer = trainer_of(model, total=2, schedule="linear")
    trainer.step(batches(toy), imitation(5))
    before = toy.weights(model)
    trainer.step(batches(toy), imitation(5))
    assert torch.equal(toy.weights(model), before)


def test_first_step_is_adams(toy):
    # the first AdamW step moves every parameter with a gradient by lr x sign(gradient), whatever its size
    model = toy.model()
    before = toy.weights(model)
    trainer_of(model).step(batches(toy), imitation(5))
    moved = (toy.weights(model) - before).abs()
    assert moved.max().item() == pytest.approx(1e-2, rel=1e-2)


def test_gradient_is_clipped_to_the_bound(toy):
    model = toy.model()
    seen: list[float] = []
    trainer = trainer_of(model, clip=0.01)
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(toy.gradient(model).norm().item()))
    norm = trainer.step(batches(toy), imitation(5))["grad_norm"].read()
    assert norm is not None
    assert norm > 0.1  # reported as it was before clipping
    assert seen == [pytest.approx(0.01, rel=1e-4)]


def test_a_small_gradient_is_left_alone(toy):
    model = toy.model()
    seen: list[float] = []
    trainer = trainer_of(model, clip=1e6)
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(toy.gradient(model).norm().item()))
    assert trainer.step(batches(toy), imitation(5))["grad_norm"].read() == pytest.approx(seen[0], rel=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_broken_loss_takes_no_step(toy, poison):
    model = toy.model()
    trainer = trainer_of(model)
    trainer.step(batches(toy), imitation(5))
    before, state = toy.weights(model), copy.deepcopy(trainer.optimizer.state_dict())
    with pytest.raises(Diverged, match=r"optimizer step 1: the step was not taken; lower optim\.lr"):
        trainer.step(batches(toy), lambda batch, scores: (scores.logp_BT.sum() * poison, {}))
    assert torch.equal(toy.weights(model), before)
    assert trainer.version == 1
    for key, value in state["state"].items():
        assert torch.equal(trainer.optimizer.state_dict()["state"][key]["exp_avg"], value["exp_avg"])


def test_a_broken_gradient_under_a_finite_loss_takes_no_step(toy):
    model = toy.model()
    before = toy.weights(model)
    with pytest.raises(Diverged):
        # sqrt at 0 has value 0 and an infinite slope; 0 x inf is NaN
        trainer_of(model).step(batches(toy), lambda batch, scores: ((scores.logp_BT.sum() * 0).sqrt(), {}))
    assert torch.equal(toy.weights(model), before)


def test_after_a_refused_step_training_goes_on_as_if_it_had_not_been(toy):
    one, other = toy.model(), toy.model()
    for model, broken in ((one, True), (other, False)):
        trainer = trainer_of(model)
        trainer.step(batches(toy), imitation(5))
        if broken:
            with pytest.raises(Diverged):
                trainer.step(batches(toy), lambda batch, scores: (scores.logp_BT.sum() * math.nan, {}))
        trainer.step(batches(toy), imitation(5))
    assert torch.equal(toy.weights(one), toy.weights(other))


def test_loss_is_the_total_and_metrics_are_merged_over_micro_batches(toy):
    whole = trainer_of(toy.model()).step(batches(toy), imitation(5))
    parts = trainer_of(toy.model()).step(batches(toy, width=1), imitation(5))
    assert len(batches(toy, width=1)) == 2
    for name in ("loss", "entropy", "grad_norm"):
        assert parts[name].read() == pytest.approx(whole[name].read(), rel=1e-5)
    assert isinstance(parts["entropy"], Mean)
    assert parts["entropy"].weight == 5


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_restored_trainer_continues_bit_for_bit(toy, tmp_path, schedule):
    straight, model = toy.model(), toy.model()
    settings = {"schedule": schedule, "warmup": 0.2, "end": 0.1}
    trainer = trainer_of(straight, total=6, **settings)
    first = trainer_of(model, total=6, **settings)
    for _ in range(3):
        trainer.step(batches(toy), imitation(5))
        first.step(batches(toy), imitation(5))
    first.save(tmp_path)
    resumed_model = toy.model(seed=9)
    resumed = trainer_of(resumed_model, total=6, **settings)
    resumed.restore(tmp_path)
    assert resumed.version == 3
    for _ in range(3):
        expected, got = trainer.step(batches(toy), imitation(5)), resumed.step(batches(toy), imitation(5))
        assert got == expected
    assert got["lr"].read() == pytest.approx(1e-2 if schedule == "constant" else 1e-3)
    assert weights_digest(straight) == weights_digest(resumed_model)


def test_another_models_checkpoint_is_refused(toy, tmp_path):
    trainer = trainer_of(toy.model())
    trainer.save(tmp_path)
    frozen = toy.model()
    frozen.model.norm.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="other parameters"):
        trainer_of(frozen).restore(tmp_path)


def test_frozen_parameters_stay(toy):
    model = toy.model()
    embedding = model.get_input_embeddings().weight.requires_grad_(False)
    before = embedding.clone()
    trainer_of(model).step(batches(toy), imitation(5))
    assert torch.equal(embedding, before)


def test_model_is_in_evaluation_mode(toy):
    model = toy.model().train()
    trainer_of(model)
    assert not any(module.training for module in model.modules())


def test_a_batch_without_trained_tokens_is_no_obstacle(toy):
    rows = [toy.row((1, 5), (20, 2), "a", owners=[Owner.FORCED, Owner.FORCED]), toy.row((1, 6), (22, 2), "b")]
    split = pack(rows, Packing(row_tokens=1, micro_tokens=1))
    one, other = toy.model(), toy.model()
    trainer_of(one).step(split, imitation(2))
    trainer_of(other).step(pack(rows[1:], Packing()), imitation(2))
    assert len(split) == 2
    torch.testing.assert_close(toy.weights(one), toy.weights(other))


def test_without_a_scorer_the_loss_sees_the_policys_scores(toy):
    seen = []
    model = toy.model()
    sampling = Sampling(temperature=0.5)
    expected = [score(model, batch, sampling).logp_BT.tolist() for batch in batches(toy)]
    trainer = LocalTrainer(model, Optim(), 10, Ranks(), sampling)
    trainer.step(batches(toy), lambda batch, scores: (seen.append(scores.logp_BT.tolist()) or scores.logp_BT.sum(), {}))
    assert seen == expected


def test_the_loss_sees_what_the_scorer_says_of_the_trained_model(toy):
    model, seen = toy.model(), []

    def scorer(scored, batch):
        assert scored is model
        return score(scored, batch, Sampling()).logp_BT.sum(), len(batch.target_N)

    def loss(batch, said):
        seen.append(said[1])
        return said[0], {}

    before = toy.weights(model)
    trainer = LocalTrainer(model, Optim(lr=1e-2), 10, Ranks(), scorer=scorer)
    trainer.step(batches(toy, width=1), loss)
    assert seen == [3, 2]
    assert not torch.equal(toy.weights(model), before)  # the gradient goes through what was said


def test_digest_tells_weights_apart(toy):
    model = toy.model()
    before = weights_digest(model)
    assert before == weights_digest(toy.model())
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-6
    assert weights_digest(model) != before


def test_a_parameter_without_part_in_the_loss_keeps_its_momentum(toy):
    model = toy.model()
    model.unused = torch.nn.Parameter(torch.ones(3))
    trainer = trainer_of(model, weight_decay=0.5)
    trainer.step(batches(toy), imitation(5))
    assert model.unused.tolist() == pytest.approx([0.995] * 3)  # decayed by lr x 0.5, as on any other number of ranks
    assert set(trainer.optimizer.state[model.unused]) == {"step", "exp_avg", "exp_avg_sq"}


def test_full_weights_are_the_models_own(toy):
    model = toy.model()
    trainer = trainer_of(model)
    found = trainer.full_weights()
    assert found.keys() == model.state_dict().keys()
    assert not any(tensor.requires_grad for tensor in found.values())
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()  # tied
    assert trainer.plain() is model
    assert not trainer.together


def test_a_snapshot_is_what_save_writes(toy, tmp_path):
    trainer = trainer_of(toy.model())
    trainer.step(batches(toy), imitation(5))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    trainer.save(tmp_path / "one")
    trainer.snapshot().save(tmp_path / "two")
    for file in ("trainable.safetensors", "optimizer.pt"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_peak_memory_is_that_of_the_largest_process(toy):
    class Beside(Ranks):
        def gather(self, value):
            return [value, ([], 1e9)] if isinstance(value, tuple) else [value]

    alone, beside = (LocalTrainer(toy.model(), Optim(), 10, ranks) for ranks in (Ranks(), Beside()))
    assert alone.peak_mib > 50
    for trainer in (alone, beside):
        trainer.step(batches(toy), imitation(5))
    assert 50 < alone.peak_mib < 1e6
    assert beside.peak_mib == 1e9


def test_peak_memory_grows_with_what_is_held():
    before = peak_mib(torch.device("cpu"))
    held = torch.ones(int(before) + 64, 2**18)  # as many MiB as the process ever had, and 64 more
    after = peak_mib(torch.device("cpu"))
    assert after >= before + 64
    del held
    assert peak_mib(torch.device("cpu")) >= after
