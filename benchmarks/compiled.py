"""torchtitan's layers as ``torch.compile`` runs them, learnt from torch's own Inductor: writes
``memplan/layers/compiled.json``. Needs the torch that the tests pin, neither a GPU nor Triton; half a minute.

python -m benchmarks.compiled
"""

from __future__ import annotations

import json
from pathlib import Path

import memplan.layers.compiled as layers
from memplan.trace.compiled import GENERIC, MODES, learnt

FILE = Path(layers.__file__).parent / "compiled.json"


def main() -> None:
    found = {f"{mode} {regime}": learnt(mode, sizes) for regime, sizes in GENERIC.items() for mode in MODES}
    FILE.write_text(json.dumps(found, indent=0).replace(",\n", ", ") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
