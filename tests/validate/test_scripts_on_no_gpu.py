"""Scripts of transformers' Trainer, run as they stand on a GPU that computes nothing (``tests/oracle/cuda_device``; its
Python needs transformers, accelerate, peft and bitsandbytes, too), beside what memplan reads from the same file."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from memplan import estimate, read_plan
from tests.oracle.cuda_device import PYTHON, environment

pytestmark = pytest.mark.skipif(
    PYTHON not in os.environ, reason=f"needs a Python with a CUDA build of torch in {PYTHON}"
)
RUNNER = Path(__file__).parents[1] / "oracle" / "cuda_device" / "trainer_script.py"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
HEAD = """
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
"""
TAIL = """
data = [{"input_ids": torch.randint(0, 32000, (512,)), "labels": torch.randint(0, 32000, (512,))} for _ in range(32)]
common = dict(output_dir="out", max_steps=3, bf16=True, report_to="none", save_strategy="no", logging_steps=1)
"""
ADAPTED = """
model = get_peft_model(model, LoraConfig(r=8, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"))
"""
SCRIPTS = {
    "fp32-8bit": """
model = AutoModelForCausalLM.from_pretrained("{folder}", dtype=torch.float32)
args = TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=2, gradient_checkpointing=True,
                         optim="adamw_bnb_8bit", **common)
""",
    "bf16": """
model = AutoModelForCausalLM.from_pretrained("{folder}", dtype=torch.bfloat16)
args = TrainingArguments(per_device_train_batch_size=4, **common)
""",
    "lora": f"""
model = AutoModelForCausalLM.from_pretrained("{{folder}}", dtype=torch.bfloat16)
{ADAPTED}
model.enable_input_require_grads()
args = TrainingArguments(per_device_train_batch_size=4, gradient_checkpointing=True, **common)
""",
    "qlora": f"""
quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                               bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained("{{folder}}", quantization_config=quantised, dtype=torch.bfloat16)
model = prepare_model_for_kbit_training(model)
{ADAPTED}
args = TrainingArguments(per_device_train_batch_size=4, gradient_checkpointing=True, optim="paged_adamw_8bit", **common)
""",
}


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    code = "import torch; print(torch.__path__[0])"
    done = subprocess.run([os.environ[PYTHON], "-c", code], capture_output=True, text=True, check=True)
    return environment(Path(done.stdout.strip()), tmp_path_factory.mktemp("cuda_device"))


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_script_takes_what_is_estimated(case: str, there: dict[str, str], tmp_path: Path) -> None:
    """Allocated to within numbers of the loss (512 bytes each) and the rests of three blocks. Reserved to 1 % (of a
    torch whose equal blocks go by rising addresses, as the driver here hands them out), but where weights are cast once
    they are loaded: the blocks that they leave are not followed."""
    folder, script = tmp_path / "model", tmp_path / "train.py"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    body = SCRIPTS[case].format(folder=folder)
    script.write_text(f"{HEAD}{TAIL}{body}Trainer(model=model, args=args, train_dataset=data).train()\n")
    command = [os.environ[PYTHON], str(RUNNER), str(script)]
    done = subprocess.run(command, env=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    steady: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])[-1]
    (stage,) = estimate(read_plan(str(script), seq=512, gpu="h200")).to_dict()["stages"]
    requested = stage["allocated_bytes"] - stage["breakdown"]["block_rounding"]  # with workspaces
    assert 0 <= requested - steady["requested"] <= 1 << 18, "each tensor is rounded up to 512 bytes"
    for reading in ("static", "allocated"):
        assert abs(stage[f"{reading}_bytes"] - steady[reading]) <= 3 << 20, reading
    assert stage["reserved_bytes"] == pytest.approx(steady["reserved"], rel=0.05 if case == "qlora" else 0.01)
