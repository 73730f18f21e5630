deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --max_len 4096 --dataset Open-Orca/OpenOrca \
  --pretrain meta-llama/Meta-Llama-3-8B --train_batch_size 256 --micro_train_batch_size 2 --zero_stage 2 \
  --max_epochs 1 --packing_samples --bf16 --learning_rate 5e-6 --gradient_checkpointing \
  --lr_scheduler cosine_with_min_lr --lr_warmup_ratio 0.03 --l2 0.01 --adam_betas 0.9 0.95 --adam_offload
