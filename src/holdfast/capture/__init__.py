"""Record the tensors of a training run, and find where two recorded runs diverge."""
