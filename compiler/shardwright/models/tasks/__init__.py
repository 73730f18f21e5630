"""Tasks a model can be trained for, one file each."""
