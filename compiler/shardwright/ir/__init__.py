"""The types that pass between stages. Nothing here does I/O or imports torch."""
