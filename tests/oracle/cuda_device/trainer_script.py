"""Runs a script of transformers' Trainer as it stands, and prints as JSON what PyTorch's allocator counted in each
step: ``python trainer_script.py SCRIPT``, with a CUDA build of torch. A model that the script names by a folder with
nothing but a ``config.json`` gets weights there first, in bf16.

It runs on a GPU, and on one that computes nothing (``environment``). There every value that is read back is 0, so that
rows would look packed, and cuDNN makes no handles: its attention is left out for PyTorch's own.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, initialization, masking_utils

from_pretrained, init = AutoModelForCausalLM.from_pretrained, Trainer.__init__
steps: list[dict[str, int]] = []


class Peaks(TrainerCallback):  # type: ignore[misc]
    """What is held, in bytes: requested and allocated at the most and between steps, reserved at the most."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        counts = torch.cuda.memory_stats()
        read = {"requested": "requested_bytes", "allocated": "allocated_bytes", "reserved": "reserved_bytes"}
        step = {name: counts[f"{count}.all.peak"] for name, count in read.items()}
        steps.append({**step, "static": counts["allocated_bytes.all.current"]})


def with_weights(name: str, *arguments: Any, **options: Any) -> Any:
    folder = Path(name)
    if (folder / "config.json").exists() and not list(folder.glob("*.safetensors")):
        config = AutoConfig.from_pretrained(folder)
        with initialization.no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.tie_weights()
        model.save_pretrained(folder)
    return from_pretrained(name, *arguments, **options)


def watched(self: Any, *arguments: Any, **options: Any) -> None:
    init(self, *arguments, **options)
    self.add_callback(Peaks())


def unpacked(find: Any) -> Any:
    """Looks as ``find`` does, and finds one sequence in each row."""

    def found(positions: torch.Tensor) -> None:
        find(positions)

    return found


def main() -> None:
    script = Path(sys.argv[1]).resolve()
    if "LD_PRELOAD" in os.environ:
        masking_utils.find_packed_sequence_indices = unpacked(masking_utils.find_packed_sequence_indices)
        torch.backends.cuda.enable_cudnn_sdp(False)
    AutoModelForCausalLM.from_pretrained, Trainer.__init__ = with_weights, watched
    os.chdir(script.parent)
    runpy.run_path(str(script), run_name="__main__")
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
