"""Megatron-LM's configuration in YAML says the same as arguments."""

from pathlib import Path

import pytest

from memplan.formats.launch import Asked
from memplan.formats.training_scripts import read
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import build_plan

YAML = """
language_model:
  num_layers: 4
  hidden_size: 256
  num_attention_heads: 8
  num_query_groups: null
  hidden_dropout: 0.0
  attention_dropout: 0.0
  add_bias_linear: False
  bias_dropout_fusion: False
  activation_func: swiglu
  recompute_granularity: selective
model_parallel:
  tensor_model_parallel_size: 2
  sequence_parallel: True
  bf16: True
  params_dtype: null
micro_batch_size: 2
global_batch_size: 16
seq_length: 512
max_position_embeddings: 512
position_embedding_type: rope
tokenizer_type: NullTokenizer
vocab_size: 1000
untie_embeddings_and_output_weights: True
use_distributed_optimizer: True
train_iters: 100
data_path: null
"""
ARGUMENTS = """--num-layers 4 --hidden-size 256 --num-attention-heads 8 --hidden-dropout 0 --attention-dropout 0
 --disable-bias-linear --no-bias-dropout-fusion --swiglu --recompute-granularity selective
 --tensor-model-parallel-size 2 --sequence-parallel --bf16 --accumulate-allreduce-grads-in-fp32 --micro-batch-size 2
 --global-batch-size 16 --seq-length 512 --max-position-embeddings 512 --position-embedding-type rope
 --tokenizer-type NullTokenizer --vocab-size 1000 --untie-embeddings-and-output-weights --use-distributed-optimizer"""


def plan_of(folder: Path, arguments: str) -> Plan:
    script = folder / "train.sh"
    script.write_text("torchrun --nproc_per_node 8 pretrain_gpt.py " + " ".join(arguments.split()))
    return build_plan(read(str(script), Asked("megatron", {})).source, {}).plan


def test_the_same_plan(tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text(YAML)
    assert plan_of(tmp_path, "--yaml-cfg gpt.yaml --num-layers 99") == plan_of(tmp_path, ARGUMENTS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not a file here"),
        ("num_layers: 4", "has no section language_model"),
        (YAML.replace("swiglu", "relu"), "must be one of swiglu, squaredrelu, gelu"),
    ],
)
def test_wrong_files(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "gpt.yaml").write_text(text)
    with pytest.raises(PlanError, match=said):
        plan_of(tmp_path, "--yaml-cfg gpt.yaml")
