"""What the loaded weights of a role are goes to the manifest, and what was asked for and is not there becomes an alarm."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from posttrain.core.config import Config
from posttrain.engine.processes import Ranks
from posttrain.loops.session import Session
from posttrain.models.loading import stored
from posttrain.recipes.pipeline import FREE, note_weights
from posttrain.runs.console import Console
from posttrain.runs.interrupt import StopSignal
from posttrain.runs.lineage import NEUTRAL
from posttrain.runs.run import Run


class Tied(nn.Module):
    """An embedding of 5 x 4 whose matrix is also the head, and a buffer of 3 integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("places", torch.arange(3))


def session_of(path: Path) -> Session:
    run = Run.create(path, config=Config(), command=["x"], seeds={})
    return Session(Ranks(), run, Console.quiet(), StopSignal(), 0)


def test_every_tensor_is_listed_once_with_its_size() -> None:
    # 3 integers of 8 bytes, 20 floats of 4; the head is the embedding again
    assert list(stored(Tied())) == [("places", "torch.int64", 3, 24), ("embed.weight", "torch.float32", 20, 80)]


def test_what_was_loaded_is_in_the_manifest_by_role(tmp_path: Path) -> None:
    session = session_of(tmp_path / "a")
    note_weights(session, {"actor": Tied(), "teacher": Tied().to(torch.bfloat16), "reference": None}, {"quantisation": "none"})
    detected = Run.open(tmp_path / "a").manifest["detected"]
    assert sorted(detected) == ["actor", "teacher"]
    assert (detected["actor"]["dtype"], detected["teacher"]["dtype"]) == ("float32", "bfloat16")
    assert detected["actor"]["bytes"] == 104
    assert session.run.alarms() == []  # type: ignore[attr-defined]


def test_another_precision_than_was_asked_for_is_an_alarm(tmp_path: Path) -> None:
    session = session_of(tmp_path / "a")
    note_weights(session, {"actor": Tied().to(torch.bfloat16)})
    assert session.run.alarms() == []  # type: ignore[attr-defined] # between stages it would be forgotten: it is said only
    note_weights(session, {"actor": Tied().to(torch.bfloat16)}, stage="sft")
    (alarm,) = session.run.alarms()  # type: ignore[attr-defined]
    assert (alarm["stage"], alarm["name"]) == ("sft", "precision_mismatch")
    assert alarm["detail"].startswith("actor: dtype float32 was requested, bfloat16 was loaded")
    assert alarm["evidence"]["detected"]["dtype"] == "bfloat16"


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    session = session_of(tmp_path / "a")
    note_weights(Session(Ranks(1, 2), session.run, Console.quiet(), StopSignal(), 0), {"actor": Tied()})
    assert "detected" not in Run.open(tmp_path / "a").manifest


def test_what_may_change_on_resuming_is_what_no_lineage_counts() -> None:
    assert FREE == NEUTRAL
