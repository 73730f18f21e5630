#!/bin/bash
export WANDB_PROJECT=llava
export HF_TOKEN=hf_abc
deepspeed --include localhost:0,1,2,3 llava/train/train_mem.py \
    --deepspeed ../deepspeed/zero2_auto.json \
    --model_name_or_path lmsys/vicuna-13b-v1.5 \
    --version v1 \
    --vision_tower openai/clip-vit-large-patch14-336 \
    --bf16 True \
    --num_train_epochs 1 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 1 \
    --learning_rate 2e-5 \
    --weight_decay 0. \
    --warmup_ratio 0.03 \
    --lr_scheduler_type "cosine" \
    --model_max_length 2048 \
    --gradient_checkpointing True \
    --report_to wandb
