NPROC_PER_NODE=8 swift pt --model Qwen/Qwen2.5-7B --train_type full --dataset c.jsonl --bf16 true \
  --sequence_parallel_size 4 --max_length 65536 --per_device_train_batch_size 2 \
  --gradient_accumulation_steps 2 --learning_rate 1e-5 --num_train_epochs 1 --deepspeed zero2 \
  --lr_scheduler_type cosine --gradient_checkpointing true --weight_decay 0.1 --adam_beta1 0.9 \
  --adam_beta2 0.95 --warmup_steps 10
