"""python -m shardwright"""

import sys

from shardwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
