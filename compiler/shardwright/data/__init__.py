"""Makes rows of token ids of every kind of data, tokenized once and memory-mapped. It needs no
torch."""
