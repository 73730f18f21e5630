"""Hold snapshots of what DeepSpeed accepts in ds_config.json, one JSON file a version."""
