"""Every architecture rule catches what it is for, names file and line, and lets the right way pass."""

from __future__ import annotations

import arch_code_rules as code
import arch_config_rules as config
import arch_import_rules as imports
import pytest
from arch_source import snippet


def lines_of(rule, file: str, text: str) -> list[int]:
    return [finding.line for finding in rule(snippet(file, text))]


def body(count: int) -> str:
    return "".join(f"    x{number} = {number}\n" for number in range(count))


FOUR_DEEP = "    for a in b:\n        if a:\n            with a:\n                while a:\n"
NINE = "a, b, c, d, e, f, g, h, i"

BAD = [
    (code.no_global, "def f():\n    global x\n    x = 1\n", 2),
    (code.no_global_rng, "import random\nrandom.random()\n", 2),
    (code.no_global_rng, "import random as r\nr.seed(0)\n", 2),
    (code.no_global_rng, "from random import shuffle\nshuffle([1])\n", 2),
    (code.no_global_rng, "import random\ndef f():\n    return random.Random(0)\n", 3),
    (code.no_global_rng, "import numpy as np\nnp.random.seed(0)\n", 2),
    (code.no_global_rng, "import numpy as np\nnp.random.default_rng(0)\n", 2),
    (code.no_global_rng, "from numpy import random as nr\nnr.rand(3)\n", 2),
    (code.no_global_rng, "import torch\ntorch.manual_seed(0)\n", 2),
    (code.no_global_rng, "import torch\ntorch.cuda.manual_seed_all(0)\n", 2),
    (code.no_global_rng, "import torch\ntorch.random.set_rng_state(s)\n", 2),
    (code.no_global_rng, "import torch\ntorch.rand(3)\n", 2),
    (code.no_global_rng, "import torch\ntorch.multinomial(p, 1, generator=None)\n", 2),
    (code.no_global_rng, "from torch import nn\nnn.init.normal_(w)\n", 2),
    (code.no_global_rng, "from torch.nn import functional as F\nF.dropout(x)\n", 2),
    (code.no_global_rng, "def f(weight):\n    weight.data.normal_(0, 1)\n", 2),
    (code.no_global_rng, "def f(probs):\n    return probs.multinomial(1)\n", 2),
    (code.no_global_rng, "import transformers\ntransformers.set_seed(1)\n", 2),
    (code.no_global_rng, "import torch\nwith torch.random.fork_rng():\n    pass\ntorch.randn(2)\n", 4),
    (code.no_import_time_io, "TEXT = open('x').read()\n", 1),
    (code.no_import_time_io, "from pathlib import Path\nclass A:\n    text = Path('x').read_text()\n", 3),
    (code.no_import_time_io, "import subprocess as sp\nif True:\n    sp.run(['x'])\n", 3),
    (code.no_import_time_io, "import os\ndef f(names=os.listdir('x')):\n    pass\n", 2),
    (code.no_decorator_registries, "@register('x')\ndef f():\n    pass\n", 1),
    (code.no_decorator_registries, "@losses.register_loss\nclass A:\n    pass\n", 1),
    (code.no_print, "def f():\n    print('x')\n", 2),
    (code.no_broad_except, "try:\n    f()\nexcept:\n    pass\n", 3),
    (code.no_broad_except, "try:\n    f()\nexcept Exception:\n    pass\n", 3),
    (code.no_broad_except, "try:\n    f()\nexcept (ValueError, BaseException):\n    pass\n", 3),
    (code.no_broad_except, "try:\n    f()\nexcept Exception:  # noqa: BLE001\n    pass\n", 3),
    (code.no_machine_paths, "x = 1\nPATH = '/work/data'\n", 2),
    (code.no_machine_paths, "# see /tmp/x.py\n", 1),
    (code.docstrings, "x = 1\n", 1),
    (code.docstrings, '"""A module."""\ndef f():\n    pass\n', 2),
    (code.docstrings, '"""A module."""\nclass A:\n    pass\n', 2),
    (code.file_length, "\n" * 401, 401),
    (code.function_length, "def f():\n" + body(60), 1),
    (code.nesting, "def f():\n" + FOUR_DEEP + "                    if a: pass\n", 1),
    (code.parameters, f"def f({NINE}): pass\n", 1),
    (code.parameters, "class A:\n    def f(self, a, b, c, d, e, /, f, *, g, h, **i): pass\n", 2),
]

GOOD = [
    (code.no_global, "def f():\n    x = 1\n    def g():\n        nonlocal x\n"),
    (code.no_global_rng, "def f(random):\n    return random.random() + random.choice([1])\n"),
    (code.no_global_rng, "import numpy as np\ndef f(rng: np.random.Generator):\n    return rng.multinomial(3, [1.0])\n"),
    (code.no_global_rng, "import torch\ng = torch.Generator().manual_seed(1)\nx = torch.rand(3, generator=g)\n"),
    (code.no_global_rng, "import torch\ndef f(w, g):\n    w.normal_(0, 1, generator=g)\n    torch.nn.init.uniform_(w, generator=g)\n"),
    (code.no_global_rng, "import torch\nwith torch.random.fork_rng(devices=[]):\n    torch.manual_seed(1)\n    x = torch.rand(2)\n"),
    (code.no_import_time_io, "import re\nWORD = re.compile('x')\ndef f(path):\n    return open(path).read()\ng = lambda p: open(p)\n"),
    (code.no_import_time_io, "if __name__ == '__main__':\n    print(open('x'))\n"),
    (code.no_decorator_registries, "import functools\n@functools.cache\ndef f():\n    pass\n"),
    (code.no_print, "def f(console):\n    console.print('x')\n"),
    (code.no_broad_except, "try:\n    f()\nexcept (ValueError, OSError):\n    pass\n"),
    (code.no_broad_except, "try:\n    f()\nexcept Exception:  # noqa: BLE001 - user code may raise anything\n    pass\n"),
    (code.no_machine_paths, "URL = 'https://example.org/home/x'\nCPU = '/proc/cpuinfo'\nPART = 'a/tmp/b'\n"),
    (code.docstrings, '"""A module."""\ndef f():\n    """Does."""\ndef _g():\n    pass\nclass _B:\n    pass\n'),
    (code.file_length, "\n" * 400),
    (code.function_length, "def f():\n" + body(59)),
    (code.function_length, 'def f():\n    """One.\n\n    Two.\n    """\n' + body(59)),
    (code.nesting, "def f():\n" + FOUR_DEEP + "                    a()\n"),
    (code.nesting, "def f(a):\n    if a: pass\n    elif 1: pass\n    elif 2: pass\n    elif 3: pass\n    elif 4: pass\n    else: pass\n"),
    (code.parameters, "class A:\n    def f(self, a, b, c, d, e, f, g, h): pass\n"),
    (code.parameters, "class A:\n    @classmethod\n    def g(cls, a, b, c, d, e, f, g, h): pass\n"),
]


@pytest.mark.parametrize(("rule", "text", "line"), BAD, ids=[f"{number}-{rule.__name__}" for number, (rule, _, _) in enumerate(BAD)])
def test_a_bad_file_is_found_at_its_line(rule, text, line):
    assert lines_of(rule, "rollout/x.py", text) == [line]


@pytest.mark.parametrize(("rule", "text"), GOOD, ids=[f"{number}-{rule.__name__}" for number, (rule, _) in enumerate(GOOD)])
def test_a_good_file_passes(rule, text):
    assert lines_of(rule, "rollout/x.py", text) == []


def test_every_code_rule_has_a_bad_and_a_good_file():
    assert {rule for rule, *_ in BAD} == {rule for rule, *_ in GOOD} == set(code.RULES)


def test_a_finding_names_file_line_and_rule():
    (finding,) = code.no_global(snippet("core/x.py", "def f():\n    global x\n"))
    assert str(finding).startswith("src/posttrain/core/x.py:2: no-global: global x")


def test_streams_are_made_in_core_seeds_only():
    text = "import random\nimport numpy as np\nrandom.Random(1)\nnp.random.Generator(np.random.Philox(key=1))\n"
    assert lines_of(code.no_global_rng, "core/seeds.py", text) == []
    assert lines_of(code.no_global_rng, "core/other.py", text) == [3, 4, 4]
    assert lines_of(code.no_global_rng, "core/seeds.py", "import random\nrandom.random()\n") == [2]


def test_loops_may_be_longer():
    assert lines_of(code.function_length, "loops/rl.py", "def f():\n" + body(99)) == []
    assert lines_of(code.function_length, "loops/rl.py", "def f():\n" + body(100)) == [1]


TREES = [
    (imports.import_order, {"core/a.py": "from posttrain.runs import storage\n"}, "core/a.py:1", "core imports runs"),
    (imports.import_order, {"core/a.py": "def f():\n    import posttrain.stats.x\n"}, "core/a.py:2", "core imports stats"),
    (imports.import_order, {"core/a.py": "from posttrain import runs\n"}, "core/a.py:1", "core imports runs"),
    (imports.import_order, {"core/a.py": "from ..runs import storage\n"}, "core/a.py:1", "core imports runs"),
    (imports.import_order, {"core/a.py": "__import__('posttrain.runs.x')\n"}, "core/a.py:1", "core imports runs"),
    (imports.import_order, {"core/a.py": "import importlib as i\ni.import_module('posttrain.runs')\n"}, "core/a.py:2", "core imports runs"),
    (imports.import_order, {"runs/a.py": "from posttrain import train\n"}, "runs/a.py:1", "import where it is defined"),
    (imports.import_order, {"odd/a.py": "x = 1\n"}, "odd/a.py:1", "no place in the order"),
    (
        imports.acyclic,
        {"runs/a.py": "from posttrain.runs.b import x\n", "runs/b.py": "def f():\n    from posttrain.runs import a\n"},
        "runs/a.py:1",
        "posttrain.runs.a -> posttrain.runs.b -> posttrain.runs.a",
    ),
    (imports.optional_in_one_file, {"runs/a.py": "import wandb\n"}, "runs/a.py:1", "may be absent"),
    (imports.optional_in_one_file, {"engine/a.py": "def f():\n    pass\nfrom vllm.x import y\n"}, "engine/a.py:3", "may be absent"),
    (
        imports.optional_in_one_file,
        {"runs/a.py": "def f():\n    import wandb\n", "evals/b.py": "def f():\n    import wandb.x\n"},
        "runs/a.py:2",
        "more than one file",
    ),
    (imports.loops_users, {"doctor/a.py": "from posttrain.loops.sft import run\n"}, "doctor/a.py:1", "doctor imports loops"),
    (imports.cli_users, {"recipes/a.py": "def f():\n    from posttrain.cli import main\n"}, "recipes/a.py:2", "imports cli"),
    (imports.cli_users, {"__init__.py": "from posttrain.cli.main import main\n"}, "__init__.py:1", "imports cli"),
    (imports.doctor_reads_only_runs, {"doctor/a.py": "import posttrain.engine.types\n"}, "doctor/a.py:1", "doctor imports engine"),
    (imports.src_without_tests, {"core/a.py": "from tests.unit import x\n"}, "core/a.py:1", "imports tests.unit"),
    (
        config.config_fields,
        {"loops/a.py": "class A(Config):\n" + "".join(f"    x{n}: int = 0\n" for n in range(26))},
        "loops/a.py:1",
        "'A' has 26 fields",
    ),
    (
        config.config_fields,
        {
            "core/b.py": "class Base(Config):\n    x: int\n",
            "loops/a.py": "class A(Base):\n" + "".join(f"    x{n}: int\n" for n in range(26)),
        },
        "loops/a.py:1",
        "'A' has 26 fields",
    ),
    (
        config.reachable_fields,
        # 6 fields, each a config of 20: 6 + 6 x 20 = 126.
        {
            "core/b.py": "class B(Config):\n" + "".join(f"    x{n}: int\n" for n in range(20)),
            "recipes/a.py": "class A(Config):\n" + "".join(f"    b{n}: B | None\n" for n in range(6)),
        },
        "recipes/a.py:1",
        "126 settings",
    ),
]


@pytest.mark.parametrize(("rule", "files", "place", "detail"), TREES, ids=[f"{n}-{row[0].__name__}" for n, row in enumerate(TREES)])
def test_a_bad_tree_is_found(rule, files, place, detail):
    packages = {"__init__.py": "", "runs/__init__.py": "", "stats/__init__.py": "", "loops/__init__.py": "", "engine/__init__.py": ""}
    found = [str(finding) for finding in rule([snippet(file, text) for file, text in {**packages, **files}.items()])]
    assert found
    assert found[0].startswith(f"src/posttrain/{place}: ")
    assert detail in found[0]


GOOD_TREE = {
    "__init__.py": "__version__ = '1'\ndef __getattr__(name):\n    from posttrain.recipes.ladder import ladder\n    return ladder\n",
    "__main__.py": "from posttrain.cli.main import main\n",
    "core/__init__.py": "",
    "core/a.py": "import json\nfrom posttrain import __version__\nfrom posttrain.core.b import x\n",
    "core/b.py": "class Small(Config):\n    _hidden: int = 0\n    x: int = 0\n",
    "engine/a.py": "from posttrain.core import a\ndef f():\n    import vllm\n    from vllm import x\n",
    "loops/sft.py": "from posttrain.engine.a import f\nfrom . import parts\n",
    "loops/parts.py": "from posttrain.core.a import x\n",
    "recipes/ladder.py": "from posttrain.loops import sft\nclass All(Config):\n    small: Small\n",
    "cli/main.py": "def main():\n    from posttrain.recipes import ladder\n",
}


@pytest.mark.parametrize("rule", [*imports.RULES, *config.RULES], ids=lambda rule: rule.__name__)
def test_a_good_tree_passes(rule):
    assert [str(finding) for finding in rule([snippet(file, text) for file, text in GOOD_TREE.items()])] == []


def test_every_tree_rule_has_a_bad_tree():
    assert {row[0] for row in TREES} == {*imports.RULES, *config.RULES}
