#!/usr/bin/env bash
set -euo pipefail
MODEL=${1:-Qwen/Qwen3-8B}
LR=1e-5
EPOCHS=${EPOCHS:-2}
NGPUS=$(nvidia-smi -L | wc -l)
if [ "$SIZE" = "big" ]; then
  BS=1
else
  BS=4
fi
ARGS="
  --learning_rate $LR
  --num_train_epochs $EPOCHS
  --per_device_train_batch_size $BS
  --gradient_accumulation_steps $GAS
  --bf16 $BF16
"
torchrun --nproc_per_node=$NGPUS --nnodes=${NNODES:-1} --node_rank=$RANK --master_addr=$MASTER_ADDR train.py \
  --model_name_or_path $MODEL $ARGS --max_seq_length $((1024 * 4)) --seed $SEED \
  --weight_decay ${WD:-0.1} --gradient_checkpointing --max_grad_norm $CLIP --save_steps $SAVE \
  --output_dir "out/$(date +%s)" 2>&1 | tee log.txt
