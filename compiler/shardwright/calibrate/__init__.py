"""`shardwright calibrate` and `tune`: what this machine does, measured, for `cluster.measured`."""
