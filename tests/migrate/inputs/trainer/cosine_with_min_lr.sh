python -m torch.distributed.run --nproc_per_node 2 finetune.py --model_name_or_path a/b --output_dir o \
  --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr": 1e-6}' --learning_rate 1e-4 \
  --max_steps 100 --warmup_steps 10 --per_device_train_batch_size 1 --fp16 --optim adamw_torch_fused \
  --gradient_checkpointing False --model_max_length 512
