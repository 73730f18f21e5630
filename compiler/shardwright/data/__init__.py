"""Make sequences of token ids from every kind of data, tokenized once and memory-mapped; without
torch."""
