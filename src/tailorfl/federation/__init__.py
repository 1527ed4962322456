"""Rounds of a federation: selection, training where the clients live, evaluation, checkpoints."""
