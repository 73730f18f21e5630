"""What DeepSpeed takes in ds_config.json, as data: a snapshot a version, and the check of a
document against it."""
