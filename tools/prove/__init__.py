"""`make prove`: the full counts in named pieces that resume. The result of a run is one JSON file
under build/prove/, outside git."""
