"""What a model is trained for, a file for each task."""
