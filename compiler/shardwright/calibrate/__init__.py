"""Measure this machine for `cluster.measured` (`shardwright calibrate` and `tune`)."""
