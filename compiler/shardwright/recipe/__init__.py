"""Stage 1 reads a recipe file into a Recipe.

recipe_parser.py parses the text into a tree with places. recipe_composition.py merges `extends` and
--set. schema_errors.py and cross_key_checks.py find errors. recipe_loader.py builds the Recipe.
input_file_checks.py looks for the files that it names.
"""
