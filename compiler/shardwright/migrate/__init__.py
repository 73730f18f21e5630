"""A DeepSpeed configuration and the command that starts it -> a recipe: `shardwright import`.

command.py reads the launch, accelerate.py Accelerate's own file; draft.py collects what is carried
and why the rest is not; engine.py, batch.py, optimizer.py and trainer.py fill it; text.py writes it
down.
"""
