"""The layers of a call, from the outermost to the attempt."""
