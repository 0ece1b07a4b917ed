"""What all tests share."""

from __future__ import annotations

import gc


def pytest_runtest_setup() -> None:
    """Tracers look for garbage all the time: not among what was imported, and left by tests before this one."""
    gc.collect()
    gc.freeze()
