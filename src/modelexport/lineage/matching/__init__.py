"""The matchers of `retag`: each finds the source node of a changed node by one clue."""
