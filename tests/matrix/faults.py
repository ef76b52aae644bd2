"""Every fault that the matrix injects, and every healthy run that it holds beside them."""

from __future__ import annotations

from tests.matrix import checks_faults, healthy, live, live_records, records_faults, settings_faults, traces
from tests.matrix.injection import Fault

FAULTS: tuple[Fault, ...] = (
    *live.FAULTS,
    *live_records.FAULTS,
    *checks_faults.FAULTS,
    *records_faults.FAULTS,
    *settings_faults.FAULTS,
    *traces.FAULTS,
)
HEALTHY: tuple[Fault, ...] = (*healthy.HEALTHY, *records_faults.HEALTHY, *traces.HEALTHY)
