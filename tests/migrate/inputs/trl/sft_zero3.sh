accelerate launch --config_file ../accelerate/deepspeed_zero3_offload.yaml trl/scripts/sft.py \
    --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --max_length 1024 \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --num_train_epochs 1 --eos_token '<|im_end|>'
