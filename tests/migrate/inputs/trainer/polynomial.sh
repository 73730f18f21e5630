python train.py --model_name_or_path a/b --output_dir o --lr_scheduler_type polynomial --learning_rate 1e-5 \
  --max_steps 10 --max_length 128 --per_device_train_batch_size 2 --optim lion_32bit --bf16 --save_steps 0.1
