nproc_per_node=4

NPROC_PER_NODE=$nproc_per_node \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
swift sft \
    --model Qwen/Qwen3-8B \
    --train_type full \
    --dataset a.jsonl \
    --torch_dtype bfloat16 \
    --max_steps 1000 \
    --per_device_train_batch_size 1 \
    --learning_rate 1e-5 \
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \
    --max_length 8192 \
    --packing true \
    --attn_impl flash_attn \
    --deepspeed zero3_offload
