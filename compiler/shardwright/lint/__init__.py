"""`shardwright lint`: rules over any ds_config.json, each shown by a test to hold for the installed
DeepSpeed."""
