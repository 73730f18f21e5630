"""Check any ds_config.json with rules that tests hold against the installed DeepSpeed."""
