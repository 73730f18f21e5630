"""Pipeline schedules: DeepSpeed's instruction streams, and how long a step takes under them.."""
