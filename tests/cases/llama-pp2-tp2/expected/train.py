"""One rank of the run. The deepspeed launcher starts this file; all else is read from plan.json
beside it."""

from shardwright.train.training_worker import main

if __name__ == "__main__":
    raise SystemExit(main())
