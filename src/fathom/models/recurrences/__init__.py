"""Recurrences, which decide how many iterations a token makes through the layers, and the input of each iteration.

- `looping.py`: `loop`, with `growth.py`, `early_loss.py`, `exit_gate.py` (`exit`) and `confidence.py`
  (`exit_confidence`).
- `ponder.py`, `ponder2.py`, `ponder3.py`, `adaponder.py`, `latent_cot.py`: a recurrence each. `pondering.py`: what
  they share.
- `draws.py`: random draws of a training step. `vocabulary_mixture.py`: the mixture of the vocabulary.
- `models/trips/`: `slots.py` runs the iterations, makes the Jacobi rounds and keeps the results of halted tokens.
  `walk.py` makes the passes.
"""
