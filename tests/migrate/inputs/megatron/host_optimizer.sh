torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers 32 --hidden-size 4096 \
  --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --train-iters 1000 \
  --lr 1e-4 --bf16 --use-distributed-optimizer --optimizer-cpu-offload --use-precision-aware-optimizer \
  --overlap-cpu-optimizer-d2h-h2d --data-path d/x_text_document
