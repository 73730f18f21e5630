torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 \
  --micro-batch-size 4 --seq-length 1024 --train-iters 10 --lr 1e-3 --mock-data --tensor-model-parallel-size 2
