"""Faults that are generated streams, written as real run directories: what cannot occur within seconds of a real run on a CPU.

Each is healthy training with dynamics that change as the sources tell it. `PAIRS` are look-alikes, of which each must name its own id.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.injection import Fault, Named, by_doctor
from tests.matrix.traces_healthy import SHAPES, healthy
from tests.matrix.traces_other import OTHER
from tests.matrix.traces_reinforced import POLICY, REWARD
from tests.matrix.traces_seam import MACHINES, SEAM
from tests.matrix.traces_write import named, write
from tests.matrix.traces_world import run_rows
