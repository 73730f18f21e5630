GPUS=8
torchrun --nproc_per_node $GPUS --nnodes $NNODES pretrain_gpt.py --tensor-model-parallel-size ${TP:-4} \
  --micro-batch-size $MBS --global-batch-size 64 --seq-length 2048 --train-iters 100 --lr $LR \
  --lr-decay-style inverse-square-root --bf16 --data-path 0.3 a_text 0.7 b_text --load ckpt --seed 5
