"""Stage 1: a recipe file -> Recipe.

recipe_parser.py makes a tree with places of the text, recipe_composition.py puts `extends` and
--set on top of each other, schema_errors.py and cross_key_checks.py find what is wrong,
recipe_loader.py builds the Recipe, input_file_checks.py looks for the files that it names.
"""
