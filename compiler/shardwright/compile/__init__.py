"""Compile a recipe: run the stages in order, and write or read the compiled folder."""
