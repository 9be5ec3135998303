"""Bodies of tiles and histograms in the cold store: move, read, bring back, check and delete them."""
