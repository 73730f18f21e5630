"""`make bench-gpu`: what this version predicts of one GPU, beside what the GPU does."""
