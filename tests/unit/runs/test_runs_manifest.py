"""What the manifest records, and how two configs are compared."""

from __future__ import annotations

import hashlib
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

import posttrain
from posttrain.core.digest import digest
from posttrain.runs.manifest import (
    build_manifest,
    code_state,
    differences,
    identity_digest,
    run_id,
    script,
    sealed,
    shown,
)


def manifest(**changes):
    given = {"config": {"seed": 0}, "command": ["posttrain", "sft", "--out", "x"], "seeds": {"seed": 0}, "digests": {}}
    return build_manifest(**(given | changes))


def test_manifest_records_versions_machine_and_config(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    record = manifest(parent={"id": "3f9a01bc"})
    assert record["schema_version"] == 2
    assert record["posttrain"] == posttrain.__version__
    assert record["packages"]["numpy"] == metadata.version("numpy")
    assert record["installed"]["versions"]["numpy"] == metadata.version("numpy")
    assert record["installed"]["digest"] == digest(record["installed"]["versions"])
    assert record["config_digest"] == digest({"seed": 0})
    assert record["environment"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert record["environment"]["OMP_NUM_THREADS"] is None
    assert record["parent"] == {"id": "3f9a01bc"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["created"])
    assert record["cpu"]["cores"] >= record["cpu"]["usable"] >= 1


def test_the_method_is_resolved_and_not_the_name_that_was_asked_for():
    method = manifest(config={"algorithm": "dr_grpo"})["method"]
    assert (method["algorithm"], method["aggregation"]) == ("dr_grpo", "constant")
    assert method["advantage_normalisation"] == {"baseline": "group mean", "scale": "none"}


def test_every_run_has_an_id_of_its_own_that_no_seed_decides():
    one, two = manifest(), manifest()
    assert re.fullmatch("[0-9a-f]{8}", one["id"])
    assert one["id"] != two["id"]
    assert run_id(one) == one["id"]
    old = {"created": "2026-01-01", "digests": {}, "seeds": {}}
    assert run_id(old) == identity_digest(old)[:8]
    assert run_id({**old, "id": "../../etc"}) != "../../etc"


def test_a_sealed_manifest_shows_a_change_by_hand():
    record = sealed({"seeds": {"seed": 0}})
    assert record["record_digest"] == digest({"seeds": {"seed": 0}})
    assert sealed({**record, "seeds": {"seed": 1}})["record_digest"] != record["record_digest"]
    assert sealed(record) == record


def test_the_identity_of_a_run_stays_when_it_goes_on():
    record = manifest()
    assert identity_digest(record) == identity_digest({**record, "history": [{}], "produced": {"a": "b"}})
    assert identity_digest(record) != identity_digest({**record, "seeds": {"seed": 9}})


def test_a_users_script_is_recorded_and_the_command_line_is_not(tmp_path, monkeypatch):
    mine = tmp_path / "train.py"
    mine.write_text("x = 1\n")
    monkeypatch.setattr("sys.argv", [str(mine), "--fast"])
    # the first 16 hex digits of sha256("x = 1\n")
    assert script() == {"name": "train.py", "digest": hashlib.sha256(b"x = 1\n").hexdigest()[:16]}
    monkeypatch.setattr("sys.argv", [str(Path(posttrain.__file__).parent / "cli" / "main.py")])
    assert script() is None
    monkeypatch.setattr("sys.argv", ["posttrain", "ladder"])
    assert script() is None


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
    clean, patch = code_state(checkout / "code")
    assert re.fullmatch("[0-9a-f]{40}", clean["revision"])
    assert (clean["dirty"], clean["diff_digest"], clean["diff_file"], patch) == (False, None, None, b"")
    (checkout / "code" / "a.py").write_text("x = 2\n")
    first, patch = code_state(checkout / "code")
    (checkout / "code" / "a.py").write_text("x = 3\n")
    second = code_state(checkout / "code").state
    assert first["revision"] == second["revision"] == clean["revision"]
    assert first["dirty"]
    assert first["diff_digest"] != second["diff_digest"]
    assert b"-x = 1\n+x = 2\n" in patch
    assert (first["diff_file"], first["diff_bytes"]) == ("code.diff", len(patch))
    assert first["diff_file_digest"] == hashlib.sha256(patch).hexdigest()[:16]


def test_a_long_diff_is_cut_and_its_digest_is_of_all_of_it(checkout, monkeypatch):
    monkeypatch.setattr("posttrain.runs.manifest.MOST_PATCH", 20)
    (checkout / "code" / "a.py").write_text("x = 2\n")
    first, patch = code_state(checkout / "code")
    assert len(patch) == 20 < first["diff_bytes"]
    (checkout / "code" / "a.py").write_text("x = 3\n")
    second = code_state(checkout / "code")
    assert second.patch == patch
    assert second.state["diff_digest"] != first["diff_digest"]


def test_a_new_file_that_no_diff_shows_makes_the_code_another(checkout):
    (checkout / "code" / "new.py").write_text("y = 1\n")
    state, patch = code_state(checkout / "code")
    assert patch == b""
    assert state["dirty"]
    assert state["untracked"] == {"new.py": hashlib.sha256(b"y = 1\n").hexdigest()[:16]}
    (checkout / "code" / "new.py").write_text("y = 2\n")
    assert code_state(checkout / "code").state["diff_digest"] != state["diff_digest"]


def test_a_run_directory_beside_the_code_does_not_make_it_another(checkout):
    before = code_state(checkout / "code").state
    (checkout / "runs").mkdir()
    (checkout / "runs" / "manifest.json").write_text("{}")
    assert code_state(checkout / "code").state == before


def test_code_state_ignores_a_checkout_that_does_not_track_the_code(checkout, monkeypatch):
    (checkout / "installed").mkdir()
    state, patch = code_state(checkout / "installed")
    assert set(state.values()) == {None}
    assert patch == b""
    monkeypatch.setenv("PATH", "")
    assert code_state(checkout / "code").state == state


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
