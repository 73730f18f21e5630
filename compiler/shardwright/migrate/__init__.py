"""Turn what a training is started with into a recipe: `shardwright import`.

file_kinds.py decides a file's kind; its readers add to the RunFiles of run_files.py. Training
programs, their names and defaults are rows of training_programs.py. launch_command.py reads
commands. launcher_keys.py, training_keys.py, trainer_arguments.py and
deepspeed_engine_keys.py fill the draft of recipe_draft.py, which becomes YAML.
"""
