"""What is valid and still gets a word."""

from __future__ import annotations

from pathlib import Path

import pytest

import memplan
from memplan.plan.environment import OF_ALLOCATOR, READ, REFUSED
from memplan.plan.read import read_plan


def messages(**flags: str | tuple[str, ...]) -> list[tuple[str, str]]:
    return [tuple(note) for note in read_plan(None, {"model": "gpt2", **flags}).warnings]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("PYTORCH_CUDA_ALLOC_CNF", "is not read by memplan; did you mean PYTORCH_CUDA_ALLOC_CONF?"),
        ("cublas_workspace_config", "is not read by memplan; did you mean CUBLAS_WORKSPACE_CONFIG?"),
        ("NCCL_NCHANNELS_PER_NET_PEER", "is not modelled"),
        ("NVTE_FUSED_ATTN_BACKEND", "is not modelled"),
    ],
)
def test_a_variable_that_changes_nothing_is_told(name: str, problem: str) -> None:
    assert messages(env=(f"{name}=1",)) == [("environment-ignored", f"{name} {problem}")]


def test_a_strange_name_stays_on_one_line() -> None:
    ((_, message),) = messages(env=("a\nb\x1b=1",))
    assert message == "a\\nb\\x1b is not modelled"


def test_variables_that_are_read_pass_in_silence() -> None:
    assert messages(env=tuple(f"{name}=1" for name in READ)) == []


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_DEBUG", "NCCL_IB_HCA"])
def test_variables_that_change_no_memory_pass_in_silence(name: str) -> None:
    assert messages(env=(f"{name}=1",)) == []


@pytest.mark.parametrize("name", sorted({*READ} - {*OF_ALLOCATOR}))
def test_every_variable_of_the_table_is_read_somewhere(name: str) -> None:
    package = Path(memplan.__file__).parent
    assert any(
        f'"{name}"' in (package / module).read_text()
        for module in ("device/facts.py", "device/nccl.py", "estimate.py", "frameworks/megatron/from_plan.py")
    )
    assert name not in REFUSED


def test_a_long_default_sequence_is_told() -> None:
    assert messages(model="llama-3-405b") == [
        ("seq-default", "seq is 4096, because no length was given; the model's maximum is 131072 tokens")
    ]
    assert messages(model="llama-3-405b", seq="4096") == []
    assert messages(model="gpt2") == messages(model="llama-2-7b") == []


LLAMA = '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, '
LLAMA += '"num_attention_heads": 2, "vocab_size": 96, "max_position_embeddings": 128}'


@pytest.mark.parametrize("model", ["gpt2", "roberta-base"])  # the second has no recipe
@pytest.mark.parametrize("name", ["config.json", "plan.yaml", "."])
def test_a_model_beside_a_file_that_is_only_another_model(name: str, model: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA)
    (tmp_path / "plan.yaml").write_text("model: llama-2-7b\n")
    path = str(tmp_path / name)
    only = "llama-2-7b" if name == "plan.yaml" else path
    read = read_plan(path, {"model": model}, traced=True)
    assert read.plan.model.name == model
    assert tuple(read.warnings[0]) == (
        "model-passed-over",
        f"the model is {model}, as --model says; {only}, which says nothing but a model, is passed over",
    )
    assert not any(note.code == "model-passed-over" for note in read_plan(path, traced=True).warnings)
    assert not any(note.code == "model-passed-over" for note in read_plan(path, {"model": only}).warnings)
    assert not any(note.code == "model-passed-over" for note in read_plan(path, {"mbs": "2"}).warnings)


def test_a_model_over_that_of_a_plan_with_more(tmp_path: Path) -> None:
    """One field among several, as every flag over a file."""
    (tmp_path / "plan.yaml").write_text("model: llama-2-7b\nbatch: {seq: 512}\n")
    assert not read_plan(str(tmp_path / "plan.yaml"), {"model": "gpt2"}).warnings
