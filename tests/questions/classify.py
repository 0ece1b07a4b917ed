from transformers import BertForSequenceClassification, Trainer, TrainingArguments

model = BertForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
Trainer(model=model, args=TrainingArguments(output_dir="x", per_device_train_batch_size=32, fp16=True)).train()
