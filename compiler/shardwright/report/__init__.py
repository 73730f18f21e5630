"""`shardwright report DIR`: a compiled folder, and its run where there is one, as one HTML page."""
