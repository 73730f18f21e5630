DATA=(--mock-data)
if [ -n "$1" ]; then DATA=(--data-path $1); fi
torchrun --nproc_per_node ${GPUS:-"8"} pretrain_gpt.py --micro-batch-size 1 --seq-length 1024 --train-iters 10 \
  --lr 1e-3 --bf16 --sequence-parallel "${DATA[@]}" $EXTRA
