accelerate launch --config_file ../accelerate/fsdp1_full_shard.yaml run_clm_no_trainer.py \
  --model_name_or_path gpt2 --dataset_name wikitext --block_size 512 --per_device_train_batch_size 2 \
  --num_warmup_steps 50 --max_train_steps 300 --checkpointing_steps 100
