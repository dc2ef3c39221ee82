"""Where files of other exporters say which module a node is from: metadata, local functions, names. For `adopt`."""
