"""A user's function is accepted when it is right, and rejected by the law that its fault breaks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from certify_functions import BAD, GOOD, HEAD, Case

from posttrain.checks.certificate import certify_file
from posttrain.checks.findings import Certificate
from posttrain.core.errors import ConfigError


def certificate(folder: Path, case: Case) -> Certificate:
    path = folder / "mine.py"
    path.write_text(HEAD + case.source, encoding="utf-8")
    name = re.findall(r"^def (\w+)", case.source, re.MULTILINE)[0]
    return certify_file(f"{path}:{name}")


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_good_functions_are_certified(case, tmp_path):
    found = certificate(tmp_path, case)
    assert found.passed, [f"{f.law}: {f.deviation} {f.detail}" for f in found.findings if not f.passed]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_bad_functions_are_rejected_by_the_law_they_break(case, tmp_path):
    found = certificate(tmp_path, case)
    failing = [finding for finding in found.findings if not finding.passed]
    assert set(case.laws) <= {finding.law for finding in failing}, [(f.law, f.detail) for f in failing]
    assert not case.text or any(case.text in finding.detail for finding in failing), [f.detail for f in failing]
    assert all("\n" not in finding.detail for finding in found.findings)


def test_there_are_enough_of_them():
    assert len(BAD) >= 12
    assert {law for case in BAD for law in case.laws} >= {"partition", "mask", "permutation", "oracle", "conservation"}


def test_without_a_coefficient_only_the_on_policy_oracle_is_checked(tmp_path):
    alone, documented = (certificate(tmp_path, case) for case in GOOD[:2])
    assert [f.applies for f in alone.findings if f.law == "oracle"] == [True, False]
    assert any("define loss_coefficient(log_ratio, advantage)" in f.detail for f in alone.findings)
    assert [f.applies for f in documented.findings if f.law == "oracle"] == [True, True]


def test_the_kl_that_is_descended_is_named(tmp_path):
    details = [" ".join(f.detail for f in certificate(tmp_path, case).findings) for case in GOOD if "def term" in case.source]
    assert "descends KL(policy || reference); its value is no unbiased estimate" in details[0]
    assert "descends KL(reference || policy); its value estimates KL(policy || reference)" in details[1]


def test_a_bias_that_is_documented_says_how_far_it_is_from_the_reward(tmp_path):
    found = certificate(tmp_path, GOOD[4])
    assert any("not promised" in f.detail and "0.74" in f.detail for f in found.findings)


def test_mistakes_in_the_name_are_one_line(tmp_path):
    path = tmp_path / "mine.py"
    with pytest.raises(ConfigError, match=r"no file .*mine\.py; Python files in .*: none"):
        certify_file(f"{path}:loss")
    path.write_text("from math import exp\ndef other(rewards): return rewards\ndef _hidden(x): pass\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no function 'loss' in .*; functions there: other$"):
        certify_file(f"{path}:loss")
    with pytest.raises(ConfigError, match=r"which function of .*mine\.py\? .*functions there: other$"):
        certify_file(str(path))
    path.write_text("def loss(logits, labels=None): return logits\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"loss\(logits\) has no form .*\(streams\).*\(rewards\).*\(logp, reference, mask\).*\(values, mask"
    ):
        certify_file(f"{path}:loss")
    path.write_text("import nothing_of_this_name\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot be imported: ModuleNotFoundError: No module named 'nothing_of_this_name'"):
        certify_file(f"{path}:loss")


def test_loading_leaves_the_interpreter_as_it_was(tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("SCALE = 1.0\n", encoding="utf-8")
    path = tmp_path / "mine.py"
    path.write_text(
        "from helper_of_mine import SCALE\ndef advantage(rewards, scale=SCALE): return [scale * (r or 0.0) for r in rewards]\n",
        encoding="utf-8",
    )
    before, modules = list(sys.path), {name for name in sys.modules if name.startswith("posttrain_user")}
    assert certify_file(f"{path}:advantage").passed
    assert sys.path == before
    assert {name for name in sys.modules if name.startswith("posttrain_user")} == modules
    sys.modules.pop("helper_of_mine")
