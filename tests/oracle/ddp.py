"""Real DistributedDataParallel and ZeroRedundancyOptimizer: processes on gloo, tiny models of transformers, storages
followed through an iteration.

``python -m tests.oracle.ddp FILE`` measures every case and writes what the tests compare with. One rank is
``python -m tests.oracle.ddp --rank FOLDER``, started by ``measure`` with torch.distributed's environment. An
iteration is cut where each forward, each backward and the step end.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .deepspeed import SIZES, free_port, summary

RANKS = 2
B, S, VOCAB = 2, 32, 1000


@dataclass(frozen=True)
class Case:
    """One model under DDP, in fp32 with eager attention."""

    family: str
    ddp: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``DistributedDataParallel``."""
    microbatches: int = 1
    no_sync: bool = False
    """Micro-batches but the last are within ``no_sync()``."""
    recompute: bool = False
    optimizer: str = "adamw"
    zero: dict[str, Any] | None = None
    """Arguments of ``ZeroRedundancyOptimizer``, if it is used."""


VIEWS = {"gradient_as_bucket_view": True}
CASES: dict[str, Case] = {
    "default": Case("llama"),
    "llama": Case("llama", {"bucket_cap_mb": 0.1}),
    "phi3": Case("phi3", {"bucket_cap_mb": 0.02}),
    "gptj": Case("gptj", {"bucket_cap_mb": 0.05}, 2, no_sync=True),
    "gpt_neox": Case("gpt_neox", {"bucket_cap_mb": 0.05, "broadcast_buffers": False}, recompute=True),
    "bert-unused": Case("bert", {"bucket_cap_mb": 0.1, "find_unused_parameters": True}, 2),
    "falcon-unused": Case("falcon", {"find_unused_parameters": True}),
    "gpt2-views": Case("gpt2", {"bucket_cap_mb": 0.2, **VIEWS}),
    "gemma2-views": Case("gemma2", {"bucket_cap_mb": 0.05, **VIEWS}, 2, recompute=True),
    "opt-static-views": Case("opt", {"bucket_cap_mb": 0.1, "static_graph": True, **VIEWS}, 2),
    "qwen3_5-views": Case("qwen3_5_text", {"bucket_cap_mb": 0.05, **VIEWS}, 2, recompute=True),
    "gpt2-views-no-sync": Case("gpt2", VIEWS, 2, no_sync=True),
    "qwen2-views-no-sync": Case("qwen2", {"bucket_cap_mb": 0.1, **VIEWS}, 3, no_sync=True),
    "zero": Case("gpt2", {"bucket_cap_mb": 0.2}, zero={}),
    "zero-views": Case("llama", VIEWS, optimizer="momentum", zero={"parameters_as_bucket_view": True}),
    "zero-adafactor": Case("qwen2", optimizer="adafactor", zero={}),
}


def measure(cases: dict[str, Case]) -> list[dict[str, Any]]:
    """By rank, the records of all ``cases``."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases").write_text(json.dumps({name: asdict(case) for name, case in cases.items()}))
        group = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment = {**os.environ, **group, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.oracle.ddp", "--ranks", name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return [json.loads((folder / str(rank)).read_text()) for rank in range(RANKS)]


def run_case(case: Case) -> dict[str, Any]:
    """Four iterations on this rank: buckets, what is held between iterations, and the stretches of the last one."""
    import torch
    import transformers
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from . import delta_kernels
    from .tracer import Follow, Trace

    config = transformers.AutoConfig.for_model(case.family, vocab_size=VOCAB, **SIZES[case.family])
    config.use_cache = False
    auto: Any = transformers.AutoModelForMaskedLM if case.family == "bert" else transformers.AutoModelForCausalLM
    trace = Trace()
    stretches: list[list[tuple[int, int]]] = []

    def cut() -> None:
        stretches.append([(change.sign, change.bytes) for change in trace.changes])
        trace.changes.clear()

    with Follow(trace) as follow:
        model = auto.from_config(config, attn_implementation="eager").train()
        if hasattr(config, "linear_num_value_heads"):
            delta_kernels.install(model)
        if case.recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for tensor in (*model.parameters(), *model.buffers()):
            follow.adopt(tensor, "state")
        wrapped: Any = DistributedDataParallel(model, **case.ddp)
        make: Any = {"adamw": torch.optim.AdamW, "momentum": torch.optim.SGD, "adafactor": torch.optim.Adafactor}[
            case.optimizer
        ]
        defaults: dict[str, Any] = {"lr": 1e-4, "foreach": True}
        if case.optimizer == "momentum":
            defaults["momentum"] = 0.9
        optimizer: Any = (
            make(wrapped.parameters(), **defaults)
            if case.zero is None
            else ZeroRedundancyOptimizer(wrapped.parameters(), make, **case.zero, **defaults)
        )
        ids = torch.randint(0, VOCAB, (B, S))
        held = first = 0
        for _ in range(4):
            gc.collect()
            trace.changes.clear()
            stretches.clear()
            held = trace.live
            for microbatch in range(case.microbatches):
                last = microbatch == case.microbatches - 1
                with nullcontext() if last or not case.no_sync else wrapped.no_sync():
                    out = wrapped(input_ids=ids, labels=ids)
                    loss = out.loss
                    del out
                    cut()
                    loss.backward()
                    del loss
                    cut()
            first = first or trace.live - held
            trace.host = True
            optimizer.step()
            trace.host = False
            optimizer.zero_grad()
            cut()
        logged = wrapped._get_ddp_logging_data()
    local = optimizer if case.zero is None else optimizer.optim
    kept = [tensor for state in local.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    return {
        "held": held,
        "after_first_backward": first,
        "initial_buckets": _numbers(logged.get("bucket_sizes")),
        "rebuilt_buckets": _numbers(logged.get("rebuilt_bucket_sizes")),
        "states": sum(tensor.numel() * tensor.element_size() for tensor in kept if tensor.dim()),
        "owned": [tensor.numel() for group in local.param_groups for tensor in group["params"]],
        "stretches": [summary(stretch) for stretch in stretches],
    }


def _numbers(text: Any) -> list[int]:
    return [int(number) for number in str(text or "").split(",") if number.strip()]


def run_ranks(folder: Path) -> int:
    """Each rank in a process of its own, all from one that has imported what they need: whether one failed."""
    import torch
    import transformers

    logging: Any = transformers.logging
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases").read_text())
    for case in cases.values():
        config = transformers.AutoConfig.for_model(case["family"])
        transformers.AutoModelForCausalLM._model_mapping[type(config)]  # type: ignore[attr-defined]
    started = []
    for rank in range(RANKS):
        process = os.fork()
        if not process:
            os.environ["RANK"] = str(rank)
            run_rank(folder, cases)
            return 0
        started.append(process)
    ended = [os.waitpid(process, 0)[1] for process in started]
    return int(any(ended))


def run_rank(folder: Path, cases: dict[str, Any]) -> None:
    import torch

    torch.distributed.init_process_group("gloo")
    records = {name: run_case(Case(**case)) for name, case in cases.items()}
    (folder / str(torch.distributed.get_rank())).write_text(json.dumps(records))
    torch.distributed.destroy_process_group()


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "--ranks":
        raise SystemExit(run_ranks(Path(arguments[1])))
    ranks = measure(CASES)
    records = {name: [rank[name] for rank in ranks] for name in CASES}
    Path(arguments[0]).write_text(json.dumps(records, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
