"""Stage 1: a recipe file -> ir.recipe.Recipe.

text.py and its two readers make a Node tree with positions, layers.py puts `extends` and --set on
top of each other, validate.py and checks.py find what is wrong, typed.py builds the Recipe,
files.py looks for the files that it names.
"""
