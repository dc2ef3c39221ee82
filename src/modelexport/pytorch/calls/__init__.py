"""The modules of a model and the calls of a run: recorded by forward hooks, without changing the model."""
