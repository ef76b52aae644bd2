"""A model divided over two processes takes the steps of an undivided one, and its state moves freely between the two."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.core.errors import ConfigError
from posttrain.core.metrics import Metric, read
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import Owner, Sample, Tokens
from posttrain.engine.batch import Batch
from posttrain.engine.machine import Machine
from posttrain.engine.nonfinite import Diverged
from posttrain.engine.processes import Ranks, launch
from posttrain.engine.scoring import score
from posttrain.engine.trainer import LocalTrainer, Optim, Scorer
from posttrain.engine.values import values
from posttrain.loops.sft import imitation
from posttrain.models.critic import Critic
from posttrain.models.lora import LoRA, add_lora
from posttrain.rollout.pack import Packing, pack, shard

DIVIDED = Machine(sharding="fsdp2")
RATES: dict[str, Any] = {"schedule": "cosine", "warmup": 0.0, "weight_decay": 0.01, "clip": 0.5}
STEPS = 3
Setting = dict[str, Any]


def small_model() -> LlamaForCausalLM:
    """Two blocks; 7 does not divide by 2, so that the parts of the ranks are of different sizes."""
    shape = {"hidden_size": 14, "intermediate_size": 21, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=51, tie_word_embeddings=True, initializer_range=0.3, **shape)).float().eval()


def lora_model() -> nn.Module:
    return add_lora(small_model(), LoRA(rank=2, alpha=4), seed=1)


def worth() -> Critic:
    critic = Critic.of(small_model())
    with torch.no_grad():
        critic.head.fill_(0.5)
    return critic


def rows() -> list[Sample]:
    """Five rows; in micro-batches of one row the first rank has three of them and the second two."""
    answers = [(20, 21, 2), (2,), (30, 31, 32, 33, 34, 35, 36, 37, 2), (40, 2), (41, 42, 43, 2)]
    return [Sample(Tokens((1, 5), (Owner.USER,) * 2), Tokens(ids, (Owner.SAMPLED,) * len(ids)), f"{i}") for i, ids in enumerate(answers)]


def towards_one(batch: Batch, values_BT: Tensor) -> tuple[Tensor, dict[str, Metric]]:
    return torch.where(batch.mask_BT, (values_BT - 1).square(), 0.0).sum() / 19, {}


def batches(ranks: Ranks) -> list[Batch]:
    return pack(shard(rows(), ranks.rank, ranks.size), Packing(row_tokens=1, micro_tokens=1))


LOSS: dict[str, Callable[..., Any]] = {"full": imitation(19), "lora": imitation(19), "critic": towards_one}
MODEL: dict[str, Callable[[], Any]] = {"full": small_model, "lora": lora_model, "critic": worth}
SCORER: dict[str, Scorer | None] = {"full": None, "lora": None, "critic": values}


def trainer_of(kind: str, ranks: Ranks, machine: Machine, lr: float = 1e-4) -> LocalTrainer:
    return LocalTrainer(MODEL[kind](), Optim(lr=lr, **RATES), STEPS + 2, ranks, scorer=SCORER[kind], machine=machine)


def trained(kind: str, ranks: Ranks, machine: Machine) -> Setting:
    """Metrics of every step and all weights after the last."""
    trainer = trainer_of(kind, ranks, machine)
    steps = [read(trainer.step(batches(ranks), LOSS[kind])) for _ in range(STEPS)]
    return {"steps": steps, "weights": {name: w.clone() for name, w in trainer.full_weights().items()}, "peak": trainer.peak_mib}


def moved(kind: str, ranks: Ranks, start: Machine, folder: Path | None, save: Path | None) -> dict[str, Tensor]:
    """Two steps, from a checkpoint or from the start; leaves one behind."""
    trainer = trainer_of(kind, ranks, start, lr=1e-3)
    if folder is not None:
        trainer.restore(folder)
    for _ in range(2):
        trainer.step(batches(ranks), LOSS[kind])
    if save is not None and (ranks.first or trainer.together):
        trainer.save(save)
    return {name: w.clone() for name, w in trainer.full_weights().items()}


def failed(ranks: Ranks) -> list[Any]:
    """A gradient that is not finite in the micro-batch of the longest row, which one of the ranks has; then a step that is taken."""
    trainer = trainer_of("full", ranks, DIVIDED)
    before = trainer.full_weights()

    def loss(batch: Batch, scores: Any) -> tuple[Tensor, dict[str, Metric]]:
        total = scores.logp_BT.sum() / 19
        return (total + (total * 0).sqrt() if len(batch.target_N) == 9 else total), {}

    with pytest.raises(Diverged) as caught:
        trainer.step(batches(ranks), loss)
    after = trainer.full_weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    sizes = [[len(batch.target_N) for batch in batches(Ranks(rank, 2))] for rank in range(2)]
    trainer.step(batches(ranks), LOSS["full"])
    return [caught.value.trace, caught.value, trainer.version, min(of_rank.index(9) for of_rank in sizes if 9 in of_rank)]


def scored(ranks: Ranks) -> list[float]:
    """Log-probabilities in a reading, in which ranks make different numbers of passes; then a step."""
    trainer = trainer_of("full", ranks, DIVIDED)
    found: list[float] = []
    for _ in range(2):
        with trainer.reading() as model:
            mine = [score(model, batch, Sampling()).logp_BT.sum().item() for batch in batches(ranks)]
        found = [value for part in ranks.gather(mine) for value in part]
        trainer.step(batches(ranks), imitation(19))
    return found


def everything(ranks: Ranks, folder: Path) -> Setting:
    """All that needs two processes, so that they start once."""
    torch.set_num_threads(1)
    found: Setting = {f"{kind}-divided": trained(kind, ranks, DIVIDED) for kind in MODEL}
    found |= {f"{kind}-copies": trained(kind, ranks, Machine()) for kind in ("full", "lora")}
    found["recomputed"] = trained("full", ranks, Machine(sharding="fsdp2", checkpoint_activations=True))
    found["bfloat16"] = trained("lora", ranks, Machine(sharding="fsdp2", precision="bfloat16", checkpoint_activations=True))
    for kind in ("full", "lora"):
        found[f"{kind}-straight"] = moved(kind, ranks, DIVIDED, None, folder / f"{kind}-two")
        found[f"{kind}-from-one"] = moved(kind, ranks, DIVIDED, folder / f"{kind}-one", None)
        found[f"{kind}-copies-from-two"] = moved(kind, ranks, Machine(), folder / f"{kind}-two", None)
    found["failed"], found["scored"] = failed(ranks), scored(ranks)
    found["idle"] = idle(ranks)
    found["plain"] = plain(ranks)
    return found


def idle(ranks: Ranks) -> Setting:
    """The second rank has no rows at all."""
    trainer = trainer_of("full", ranks, DIVIDED)
    mine = pack(rows(), Packing(row_tokens=1, micro_tokens=1)) if ranks.first else []
    metrics = trainer.step(mine, imitation(19))
    return {"steps": [read(metrics)], "weights": {name: w.clone() for name, w in trainer.full_weights().items()}}


def plain(ranks: Ranks) -> list[Any]:
    """What is left after training is an ordinary model."""
    trainer = trainer_of("lora", ranks, DIVIDED)
    trainer.step(batches(ranks), imitation(19))
    model: Any = trainer.plain()
    ordinary = all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    frozen = [name for name, p in model.named_parameters() if p.requires_grad] == list(trainer.parameters)
    again = copy.deepcopy(model)
    logits = again(input_ids=torch.tensor([[1, 5, 20]])).logits
    single = trainer_of("lora", Ranks(), Machine())
    single.step(batches(Ranks()), imitation(19))
    with torch.no_grad():
        difference = (logits - single.model(input_ids=torch.tensor([[1, 5, 20]])).logits).abs().max().item()
    return [ordinary, tied, frozen, difference]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("sharding")
    for kind in ("full", "lora"):
        for size in ("one", "two"):
            (root / f"{kind}-{size}").mkdir()
        moved(kind, Ranks(), Machine(), None, root / f"{kind}-one")
    return root


@pytest.fixture(scope="module")
def two(folder) -> Setting:
    return launch(everything, 2, folder)


def assert_same(found: Setting, expected: Setting, bound: float = 1e-6) -> None:
    assert len(found["steps"]) == len(expected["steps"])
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        assert ours == {name: pytest.approx(value, abs=bound, rel=bound) for name, value in theirs.items()}
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, atol=bound, rtol=0)


@pytest.mark.parametrize("kind", ["full-divided", "full-copies", "lora-divided", "lora-copies", "critic-divided"])
def test_two_processes_take_the_steps_of_one(two, kind):
    name = kind.split("-")[0]
    one = trained(name, Ranks(), Machine())
    start = MODEL[name]().state_dict()
    assert max((one["weights"][key] - value).abs().max().item() for key, value in start.items()) > 1e-4
    assert_same(two[kind], one)


def test_recomputed_blocks_change_nothing_of_a_divided_step(two):
    assert two["recomputed"]["steps"] == two["full-divided"]["steps"]
    for name, weight in two["full-divided"]["weights"].items():
        assert torch.equal(two["recomputed"]["weights"][name], weight)


def test_bfloat16_of_a_divided_model_is_that_of_an_undivided_one(two):
    one = trained("lora", Ranks(), Machine(precision="bfloat16"))
    assert_same(two["bfloat16"], one, bound=1e-5)
    assert two["bfloat16"]["steps"] != two["lora-divided"]["steps"]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_checkpoint_moves_between_one_process_and_two(two, folder, kind):
    one = moved(kind, Ranks(), Machine(), folder / f"{kind}-two", None)
    straight = moved(kind, Ranks(), Machine(), folder / f"{kind}-one", None)
    for name, weight in straight.items():
        torch.testing.assert_close(one[name], weight, atol=1e-5, rtol=0)
        torch.testing.assert_close(two[f"{kind}-from-one"][name], weight, atol=1e-5, rtol=0)
        torch.testing.assert_close(two[f"{kind}-copies-from-two"][name], weight, atol=1e-5, rtol=0)
    half = moved(kind, Ranks(), Machine(), None, None)
    assert max((straight[name] - half[name]).abs().max().item() for name in half) > 3e-4


def test_what_two_processes_saved_is_complete(two, folder):
    one, other = (LocalTrainer(small_model(), Optim(), 5, Ranks()) for _ in range(2))
    one.restore(folder / "full-two")
    for name, weight in two["full-straight"].items():
        torch.testing.assert_close(one.full_weights()[name], weight, atol=0, rtol=0)
    other.restore(folder / "full-one")
    for place, entry in other.optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            torch.testing.assert_close(one.optimizer.state_dict()["state"][place][name], value, atol=1e-4, rtol=1e-3)


def test_a_failed_step_of_a_divided_model_is_traced_and_not_taken(two):
    trace, error, version, longest = two["failed"]
    assert trace.what == "gradient"
    assert (trace.place.process, trace.place.micro_batch, trace.place.of) == (None, longest, 3)
    assert 1 <= len(trace.place.rows) <= 2
    assert "model.norm.weight" in trace.parameters
    assert str(trace) in str(error)
    assert version == 1


def test_a_reading_is_complete_on_every_rank(two):
    trainer = trainer_of("full", Ranks(), Machine())
    trainer.step(batches(Ranks()), imitation(19))
    expected = [score(trainer.model, batch, Sampling()).logp_BT.sum().item() for batch in batches(Ranks())]
    assert sorted(two["scored"]) == pytest.approx(sorted(expected), abs=1e-5)


def test_a_rank_without_rows_takes_part(two):
    one = trainer_of("full", Ranks(), Machine())
    metrics = read(one.step(batches(Ranks()), imitation(19)))
    assert_same(two["idle"], {"steps": [metrics], "weights": one.full_weights()})


def test_the_plain_model_is_an_ordinary_one(two):
    ordinary, tied, frozen, difference = two["plain"]
    assert (ordinary, tied, frozen) == (True, True, True)
    assert difference < 1e-5


def test_one_process_divides_nothing():
    trainer = trainer_of("full", Ranks(), DIVIDED)
    assert not trainer.together
    assert trainer.plain() is trainer.model
    assert_same(trained("full", Ranks(), DIVIDED), trained("full", Ranks(), Machine()), bound=0.0)


def test_eight_bit_moments_are_not_divided():
    with pytest.raises(ConfigError, match=r"machine\.sharding=fsdp2; use machine\.optimizer=adamw"):
        trainer_of("full", Ranks(), Machine(sharding="fsdp2", optimizer="adamw8bit"))


def resident() -> int:
    """Bytes of main memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def held(ranks: Ranks) -> list[int]:
    """Bytes that this process gains by a trainer of 8 blocks of 10.5 MB after two steps, divided and not."""
    torch.set_num_threads(1)
    trained("full", ranks, DIVIDED)  # loads what is loaded late
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    found = []
    for machine in (DIVIDED, Machine()):
        before = resident()
        model = LlamaForCausalLM(LlamaConfig(vocab_size=51, tie_word_embeddings=True, **shape)).float()
        trainer = LocalTrainer(model, Optim(), 5, ranks, machine=machine)
        for _ in range(2):
            trainer.step(batches(ranks), imitation(19))
        found.append(resident() - before)
        del trainer, model
        gc.collect()
    return ranks.gather(found)[1]  # of the process that does nothing else


@pytest.mark.slow
def test_a_divided_model_takes_less_memory():
    divided, whole = launch(held, 2)
    assert whole > 150e6  # weights and two moments: 3 x 84 MB
    assert divided < 0.75 * whole
