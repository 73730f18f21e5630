accelerate launch --config_file ../accelerate/fsdp2.yaml examples/scripts/dpo.py --model_name_or_path a/b --beta 0.1
