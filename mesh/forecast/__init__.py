"""Evaluation of the survival estimate and of other models on traces: `mesh debug survive eval`. Not used by the daemon."""
