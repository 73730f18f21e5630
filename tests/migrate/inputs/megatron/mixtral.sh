#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
srun --mpi=pmix python -u pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \
  --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
  --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 8 \
  --tensor-model-parallel-size 1 --sequence-parallel --context-parallel-size 1 --seq-length 4096 \
  --micro-batch-size 1 --global-batch-size 256 --train-samples 100000 --lr 1e-4 --lr-decay-style WSD \
  --lr-wsd-decay-iters 50 --bf16 --use-distributed-optimizer --recompute-granularity selective --recompute-modules moe_act layernorm --save-interval 500 \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model mistralai/Mixtral-8x7B-v0.1 --data-path my_text_document
