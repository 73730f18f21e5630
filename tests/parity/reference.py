"""What every layout is compared with; `shardwright verify` compares with the same."""

from shardwright.hf.reference import Reference, cosine, initial_model, next_token_loss, token_rows, train

__all__ = ["Reference", "cosine", "initial_model", "next_token_loss", "token_rows", "train"]
