"""Tables, argument checks, tracing, renaming and names without wrappers: used by all folders, public for none."""
