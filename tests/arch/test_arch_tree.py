"""The package and its tests keep the rules. What each rule catches is shown in test_arch_snippets.py."""

from __future__ import annotations

import arch_code_rules
import arch_config_rules
import arch_import_rules
import pytest
from arch_source import load, load_tests, report

MODULES = load()
TEST_MODULES = load_tests()


def by_name(rule) -> str:
    return rule.__name__


def test_the_package_was_found():
    assert {"posttrain", "posttrain.core.config", "posttrain.runs.run"} <= {module.name for module in MODULES}


@pytest.mark.parametrize("rule", [*arch_import_rules.RULES, *arch_config_rules.RULES], ids=by_name)
def test_rules_on_the_whole_package(rule):
    findings = list(rule(MODULES))
    assert not findings, f"\n{report(findings)}"


@pytest.mark.parametrize("rule", arch_code_rules.RULES, ids=by_name)
def test_rules_on_each_file(rule):
    findings = [finding for module in MODULES for finding in rule(module)]
    assert not findings, f"\n{report(findings)}"


@pytest.mark.parametrize("rule", [arch_code_rules.no_machine_paths, arch_code_rules.file_length], ids=by_name)
def test_rules_on_each_test_file(rule):
    # The tests of the rules themselves have to spell out what is forbidden.
    findings = [finding for module in TEST_MODULES if not module.file.startswith("tests/arch/") for finding in rule(module)]
    assert not findings, f"\n{report(findings)}"
