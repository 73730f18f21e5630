"""Stage 8: a compiled folder, trained under the `deepspeed` launcher. Reads a Plan; knows no recipe and no search."""
