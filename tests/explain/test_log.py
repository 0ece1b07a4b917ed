"""Logs: long, coloured, of several ranks, with bars, in pieces of any size."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from memplan.explain import explain, log
from memplan.explain.clues import clues
from memplan.explain.log import BEFORE, Frame, Reported, reports
from memplan.plan.read import read_plan

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU {gpu} has a total capacity of "
    "79.11 GiB of which 1.10 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of "
    "the allocated memory 70.00 GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated."
)
FRAMES = """Traceback (most recent call last):
  File "/opt/train.py", line 12, in <module>
    trainer.train()
  File "/opt/transformers/models/llama/modeling_llama.py", line 837, in forward
    logits = logits.float()
"""


def one_rank(rank: int) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in (FRAMES + MESSAGE.format(gpu=rank % 8)).splitlines())


def read(text: str, piece: int = 1 << 20) -> tuple[Reported, ...]:
    data = text.encode()
    return reports(data[at : at + piece] for at in range(0, len(data), piece))


def test_ranks_have_their_own_frames_and_messages() -> None:
    lines = zip(one_rank(3).splitlines(), one_rank(12).splitlines(), strict=True)
    found = read("".join(f"{one}\n{other}\n" for one, other in lines))
    assert [(one.rank, one.message.gpu) for one in found] == [(3, 3), (12, 4)]
    for one in found:
        assert [frame.line for frame in one.frames] == [12, 837]
        assert one.frames[-1].code == "logits = logits.float()"


def test_colours_times_and_bars() -> None:
    bar = "\r".join(f" 19%|█▉        | {step}/16700 [3:34:12<38:35:22, 10.32s/it]" for step in range(3000, 3238))
    log = f"{bar}\x1b[31mTraceback (most recent call last):\x1b[0m\n" + "\n".join(
        f"2026-11-22 10:00:01,123 [RANK 5]: \x1b[1m{line}\x1b[0m"
        for line in (FRAMES + MESSAGE.format(gpu=5)).splitlines()
    )
    (found,) = read(log)
    assert found.rank == 5
    assert found.steps is None or found.steps == 3237
    assert found.message.capacity is not None
    assert [frame.function for frame in found.frames] == ["<module>", "forward"]


def test_boxes_and_notebooks() -> None:
    boxed = "\n".join(
        f"│ {line:<96} │"
        for line in (
            "/opt/bitsandbytes/autograd/_functions.py:512 in forward",
            "   511 │   # transpose",
            " ❱ 512 │   output = torch.nn.functional.linear(A, F.dequantize_fp4(B, state).to(A.dtype).t(), bias)",
        )
    )
    (found,) = read(f"{boxed}\n{MESSAGE.format(gpu=0)}")
    assert found.frames[-1].function == "forward"
    assert "dequantize_fp4" in found.frames[-1].code
    notebook = "File /opt/torch/nn/functional.py:3479, in cross_entropy(input, target)\n"
    notebook += "--> 3479 return torch._C._nn.cross_entropy_loss(\n"
    (found,) = read(notebook + MESSAGE.format(gpu=0))
    assert found.frames[-1].line == 3479
    assert found.frames[-1].code.startswith("return torch._C._nn")


def test_a_message_that_was_broken_over_lines() -> None:
    words = MESSAGE.format(gpu=0).split(" ")
    (found,) = read("\n".join(" ".join(words[at : at + 9]) for at in range(0, len(words), 9)))
    assert found.message.unallocated == 5 << 30
    assert found.message.free is not None


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 400_000))
def test_pieces_of_any_size_give_the_same(piece: int, before: int) -> None:
    text = "x" * 70 + "\n"
    log = text * (before // len(text)) + one_rank(1) + text * 300 + one_rank(2) + text * 30
    piece = max(piece, len(log) // 500)
    assert read(log, piece) == read(log)


def test_nothing_is_nothing() -> None:
    assert read("all went well\nmemory 12 GiB\n") == ()
    assert read("") == ()


def test_a_long_log_is_read_as_fast_as_it_comes() -> None:
    noise = b"iteration 10/ 120000 | elapsed time per iteration (ms): 16491.5 | loss scale: 1.0 |\n" * 12_000
    began = time.process_time()
    (found,) = reports([*[noise] * 128, one_rank(7).encode()])
    assert found.rank == 7
    assert len(noise) * 128 > 1 << 26
    assert time.process_time() - began < 6


def test_a_log_of_nothing_but_messages_is_passed_over_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of half a MB grows by what is behind its last mark, not by one message."""
    find, calls = log._next_mark, []

    def counted(*words: Any) -> int:
        calls.append(words)
        return find(*words)

    monkeypatch.setattr(log, "_next_mark", counted)
    line = b"CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 8.00 GiB total capacity\n"
    assert sum(len(text) for text, _ in log.windows([line * 20_000])) > len(line) * 20_000
    assert len(calls) < 20


def test_what_is_held_is_bounded() -> None:
    """A file that is nothing but beginnings of messages."""
    began = time.process_time()
    assert len(read("CUDA out of memory. " * (8 * BEFORE // 20))) <= 256
    assert time.process_time() - began < 6


def test_lines_of_several_machines_quotations_and_notebooks() -> None:
    """pdsh's names before ranks (deepspeedai/DeepSpeed#6737), a quoted log (#3869), a notebook's frames
    (huggingface/transformers#24658)."""
    text = (FRAMES + MESSAGE.format(gpu=6)).splitlines()
    for before, rank in (("worker-5: [rank22]: ", 22), ("> ", None), ("> > ", None), ("> [rank3]: ", 3)):
        (found,) = read("".join(f"{before}{line}\n" for line in text))
        assert found.rank == rank
        assert [frame.function for frame in found.frames] == ["<module>", "forward"]
    (found,) = read(
        "File /opt/deepspeed/runtime/engine.py:1474, in DeepSpeedEngine._configure_zero_optimizer(self, optimizer)\n"
        "-> 1474         optimizer = DeepSpeedZeroOptimizer_Stage3(\nRuntimeError: CUDA error: out of memory\n"
    )
    assert [frame.function for frame in found.frames] == ["_configure_zero_optimizer"]


def test_what_no_process_has_is_not_known() -> None:
    """axolotl-ai-cloud/axolotl#998, under WSL."""
    text = MESSAGE.format(gpu=0).replace("78.00 GiB memory in use", "17179869184.00 GiB memory in use")
    (found,) = read(text + " Process 2954422 has 17179869184.00 GiB memory in use.")
    assert found.message.in_process is None
    assert found.message.others == ()


def test_a_frame_of_an_old_notebook() -> None:
    """IPython before 8: the file, the function with its arguments, and an arrow at the line."""
    text = (
        "/opt/transformers/trainer_pt_utils.py in torch_pad_and_concatenate(tensor1, tensor2, padding_index)\n"
        "     87     if len(tensor1.shape) == 1:\n"
        "---> 88         return torch.cat((tensor1, tensor2), dim=0)\n"
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 12.95 GiB (GPU 0; 39.56 GiB total capacity)\n"
    )
    ((frame,),) = (one.frames for one in reports([text.encode()]))
    assert (frame.function, frame.code) == ("torch_pad_and_concatenate", "return torch.cat((tensor1, tensor2), dim=0)")
    assert clues([frame]).phase == "evaluation"


def test_phases_of_frames_without_a_pass_of_their_own() -> None:
    """What transformers' losses, ZeRO-3's construction and LLaMA-Factory's loader are called."""
    for file, function, phase in (
        ("transformers/loss/loss_utils.py", "fixed_cross_entropy", "forward"),
        ("deepspeed/runtime/zero/stage3.py", "_create_fp32_partitions", "initialisation"),
        ("deepspeed/runtime/zero/stage3.py", "_optimizer_step", "step"),
        ("llamafactory/model/loader.py", "load_model", "loading"),
    ):
        assert clues([Frame(f"/opt/{file}", 1, function)]).phase == phase


def test_words_that_a_terminal_broke() -> None:
    """As in https://github.com/modelscope/ms-swift/issues/3848 and axolotl's issue 1813: the process that it lists is
    the one that asked, in a container."""
    text = (
        "[rank4]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.42 GiB. GPU 4 has a to\n"
        "tal capacity of 39.56 GiB of which 1.05 GiB is free. Process 3679748 has 38.51 GiB memory in use. Of the\n"
        "allocated memory 36.33 GiB is allocated by PyTorc\n"
        "h, and 354.65 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large\n"
    )
    (one,) = read(text)
    message = one.message
    assert (message.allocated or 0) >> 20 == int(36.33 * 1024)
    assert (message.capacity or 0) >> 20 == int(39.56 * 1024)
    assert message.others == ()
    assert message.in_process is not None


def test_a_negative_number_is_no_exit_code() -> None:
    assert read("reward: -9.31\n" * 1000 + "step 3 code: 137.5\n") == ()
    assert [one.message.who for one in read("exitcode  : -9 (pid: 12)\n")] == ["killed"]
    assert [one.message.who for one in read("    Exit Code:    137\n")] == ["killed"]


def test_what_machines_pods_and_workers_put_before_lines() -> None:
    """pdsh's addresses, ``kubectl logs --prefix`` and Ray's workers (verl, OpenRLHF), whose lines stand between
    those of others."""
    text = (FRAMES + MESSAGE.format(gpu=6)).splitlines()
    for first, second, rank in (
        ("10.0.0.3: [rank5]: ", "10.0.0.4: [rank6]: ", 5),
        ("[pod/train-worker-3/pytorch] ", "[pod/train-worker-4/pytorch] ", None),
        ("\x1b[36m(WorkerDict pid=71, ip=10.0.0.1)\x1b[0m ", "\x1b[36m(WorkerDict pid=72)\x1b[0m ", None),
    ):
        found = read("".join(f"{before}{line}\n" for line in text for before in (first, second)))
        assert found[0].rank == rank
        assert [[frame.function for frame in one.frames] for one in found] == [["<module>", "forward"]] * len(found)


def test_lines_in_json() -> None:
    """Docker's ``json-file``, and what torchelastic leaves in ``error_file``, whole and cut off."""
    text = FRAMES + MESSAGE.format(gpu=6)
    docker = "".join(json.dumps({"log": f"[rank3]: {line}\n", "stream": "stderr"}) + "\n" for line in text.splitlines())
    about = {"message": MESSAGE.format(gpu=6), "extraInfo": {"py_callstack": FRAMES + MESSAGE.format(gpu=6)}}
    elastic = json.dumps({"message": about})
    for log_in_json, rank in ((docker, 3), (elastic, None), (elastic[:-9], None)):
        (found,) = read(log_in_json)
        assert found.rank == rank
        assert [frame.function for frame in found.frames] == ["<module>", "forward"]
    deep = '{"log": "CUDA out of memory. Tried to allocate 2.00 GiB", "a": ' + "[" * 60_000
    assert [one.message.request for one in read(deep)] == [2 << 30]


def test_a_bar_of_loading_without_frames() -> None:
    message = MESSAGE.format(gpu=0)
    for bar, phase in (("97%|#########6| 29/30 [00:50<00:01,  1.73s/it]", "loading"), ("100%|##########| 30/30", "")):
        (found,) = read(f"Loading checkpoint shards:  {bar}\n{message}")
        assert clues(found.frames).phase == phase


def test_what_compiled_code_allocates() -> None:
    """karpathy/nanochat#443."""
    code = "    buf706 = empty_strided_cuda((65536, 65536), (65536, 1), torch.bfloat16)\n"
    frame = f'  File "/tmp/torchinductor_u/c5.py", line 5269, in call\n{code}'
    text = f"{frame}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB"
    assert [one.factors for one in explain(text).guesses] == ["65,536 × 65,536 × 2 bytes"]
    plan = read_plan(None, {"model": "gpt2", "vocab": "65536", "mbs": "64", "dtype": "bf16"}).plan
    first = explain(text, plan).candidates[0]
    assert first.shape[-1] == 65536
    assert "the line allocates its shape" in first.reasons


def test_what_a_truncated_log_is_filled_with() -> None:
    """``logrotate`` with ``copytruncate`` leaves NULs before what is written next."""
    for end in ("Killed", MESSAGE.format(gpu=0), "exitcode: -9 (pid: 3)"):
        assert len(read("step 1\n" * 1000 + "\0" * 5000 + f"\n{end}\n")) == 1
        assert len(read("\0" * 5000 + f"\n{end}\n" + "\0" * 100, piece=64)) == 1
