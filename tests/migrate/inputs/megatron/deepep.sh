#!/bin/bash
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \
  --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 --tensor-model-parallel-size 1 \
  --moe-token-dispatcher-type flex --moe-enable-deepep --moe-router-dtype fp32 --overlap-moe-expert-parallel-comm \
  --seq-length 4096 --micro-batch-size 1 --global-batch-size 256 --train-iters 1000 --lr 1e-4 --bf16 --data-path my_text_document
