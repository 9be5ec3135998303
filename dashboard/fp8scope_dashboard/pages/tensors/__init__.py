"""The tensors of a run: the folded map, the ranking, and the picture of one tensor."""
