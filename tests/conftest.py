"""No test reads the records of whoever runs it: estimates would then depend on their GPUs."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

_EMPTY = tempfile.mkdtemp(prefix="memplan-no-records-")
# When this is imported, before any test module: some keep the environment of the processes that they start.
os.environ["MEMPLAN_DATA"] = _EMPTY
atexit.register(shutil.rmtree, _EMPTY, ignore_errors=True)
