# ruff: noqa
# mypy: ignore-errors
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments, Trainer
import torch

model_id = "meta-llama/Llama-3.2-3B"
model = AutoModelForCausalLM.from_pretrained(
    model_id, torch_dtype=torch.bfloat16, attn_implementation="flash_attention_2"
)
tok = AutoTokenizer.from_pretrained(model_id)
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=8,
    gradient_checkpointing=True,
    bf16=True,
    optim="adamw_torch_fused",
    num_train_epochs=3,
    learning_rate=2e-5,
    save_strategy="epoch",
)
trainer = Trainer(model=model, args=args, train_dataset=ds)
trainer.train()
