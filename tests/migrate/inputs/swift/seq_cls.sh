swift sft --model Qwen/Qwen2.5-0.5B --task_type seq_cls --num_labels 2 --learning_rate 1e-4
