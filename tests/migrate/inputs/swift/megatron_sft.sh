NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --dataset d.jsonl \
  --tensor_model_parallel_size 2 --expert_model_parallel_size 4 --sequence_parallel true \
  --micro_batch_size 1 --global_batch_size 16 --max_length 2048 --packing true \
  --lr 1e-5 --min_lr 1e-6 --lr_decay_style cosine --lr_warmup_fraction 0.05 --max_epochs 1 \
  --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --bf16 true \
  --use_distributed_optimizer true --save out
