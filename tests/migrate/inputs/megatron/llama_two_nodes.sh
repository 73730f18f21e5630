torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
  --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 \
  --micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine \
  --lr-warmup-iters 100 --clip-grad 1.0 --bf16 --use-distributed-optimizer --data-path d/x_text_document
