"""The cost model against published runs: its constants' fit, and how far off it is."""
