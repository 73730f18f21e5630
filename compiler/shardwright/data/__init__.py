"""What a run trains on: every kind of data becomes rows of token ids, tokenized once and memory-mapped. No torch."""
