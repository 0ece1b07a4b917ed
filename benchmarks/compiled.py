"""torchtitan's layers as ``torch.compile`` runs them, learnt from torch's own Inductor: writes
``memplan/layers/compiled.json``. Needs the torch that the tests pin, neither a GPU nor Triton, and torchao (0.18.0) for
layers in float8, which stay as they are without; some minutes.

python -m benchmarks.compiled
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import product

import memplan.layers.compiled as layers
from memplan.trace.compiled import GENERIC, MODES, float8_layers, learnt


def main() -> None:
    found = json.loads(layers.FILE.read_text(encoding="utf-8"))
    found |= {f"{mode} {regime}": learnt(mode, sizes) for regime, sizes in GENERIC.items() for mode in MODES}
    if find_spec("torchao") is not None:
        for (low, sizes), mode in product(float8_layers(), MODES):
            found[layers.name_of(mode, sizes, low)] = learnt(mode, sizes, low)
    layers.FILE.write_text(json.dumps(found, indent=0).replace(",\n", ", ") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
