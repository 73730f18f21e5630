"""`make prove`: the full counts in named pieces that resume, each result stamped with the code that
it speaks of."""
