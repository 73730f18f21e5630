"""The pages of docs/ that are written from the code, and the outputs of commands in the others."""
