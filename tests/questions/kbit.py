import torch
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

bnb = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True
)
model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-v0.3", quantization_config=bnb, device_map={"": 0})
model = prepare_model_for_kbit_training(model)
peft_config = LoraConfig(r=64, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = SFTTrainer(
    model=model,
    peft_config=peft_config,
    args=SFTConfig(
        output_dir="x",
        max_length=2048,
        packing=True,
        per_device_train_batch_size=4,
        gradient_checkpointing=True,
        optim="paged_adamw_32bit",
        bf16=True,
    ),
)
trainer.train()
