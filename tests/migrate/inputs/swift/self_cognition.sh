nproc_per_node=2
CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=$nproc_per_node swift sft --model_name swift-robot --model_author swift \
  --model Qwen/Qwen3-4B --tuner_type lora_llm --gradient_accumulation_steps $(expr 16 / $nproc_per_node / 2) \
  --per_device_train_batch_size 1 --max_length 2048 --learning_rate 1e-4 --load_from_cache_file true
