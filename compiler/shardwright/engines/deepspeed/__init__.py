"""DeepSpeed: its files, its rules and its trainers."""
