"""What the manifest records, and how two configs are compared."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

import posttrain
from posttrain.core.digest import digest
from posttrain.runs.manifest import build_manifest, code_state, differences, shown


def manifest(**changes):
    given = {"config": {"seed": 0}, "command": ["posttrain", "sft", "--out", "x"], "seeds": {"seed": 0}, "digests": {}}
    return build_manifest(**(given | changes))


def test_manifest_records_versions_machine_and_config(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    record = manifest(parent="runs/base")
    assert record["schema_version"] == 1
    assert record["posttrain"] == posttrain.__version__
    assert record["packages"]["numpy"] == metadata.version("numpy")
    assert record["config_digest"] == digest({"seed": 0})
    assert record["environment"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert record["environment"]["OMP_NUM_THREADS"] is None
    assert record["parent"] == "runs/base"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["created"])
    assert record["cpu"]["cores"] >= 1


def test_secrets_of_the_environment_are_not_recorded(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-value")
    assert "secret-value" not in repr(manifest())


def test_a_package_that_is_not_installed_is_none(monkeypatch):
    monkeypatch.setattr("posttrain.runs.manifest.PACKAGES", ("no-such-package-anywhere",))
    assert manifest()["packages"] == {"no-such-package-anywhere": None}


def test_kind_comes_from_the_config_or_else_the_subcommand():
    assert manifest(config={"recipe": "toy"})["kind"] == "toy"
    assert manifest()["kind"] == "sft"
    assert manifest(command=["train.py", "--fast"])["kind"] is None


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1\n")
    for arguments in (["init", "-q"], ["add", "code"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True)
    return tmp_path


def test_code_state_of_a_clean_and_a_changed_checkout(checkout):
    clean = code_state(checkout / "code")
    assert re.fullmatch("[0-9a-f]{40}", clean["revision"])
    assert (clean["dirty"], clean["diff_digest"]) == (False, None)
    (checkout / "code" / "a.py").write_text("x = 2\n")
    first = code_state(checkout / "code")
    (checkout / "code" / "a.py").write_text("x = 3\n")
    second = code_state(checkout / "code")
    assert first["revision"] == second["revision"] == clean["revision"]
    assert first["dirty"]
    assert first["diff_digest"] != second["diff_digest"]


def test_code_state_ignores_a_checkout_that_does_not_track_the_code(checkout, monkeypatch):
    (checkout / "installed").mkdir()
    unknown = {"revision": None, "dirty": None, "diff_digest": None}
    assert code_state(checkout / "installed") == unknown
    monkeypatch.setenv("PATH", "")
    assert code_state(checkout / "code") == unknown


def test_a_difference_names_key_and_both_values():
    a = {"seed": 0, "sft": {"lr": 1e-5, "epochs": 2}, "names": ["x"], "old": None}
    b = {"seed": 0, "sft": {"lr": 3e-5, "epochs": 2}, "names": ["x", "y"], "new": {"z": 1}}
    assert shown(differences(a, b)) == [
        "names: ['x'] -> ['x', 'y']",
        "new: unset -> {'z': 1}",
        "old: None -> unset",
        "sft.lr: 1e-05 -> 3e-05",
    ]
    assert shown(differences(a, a)) == []
