"""FX graph to FX graph: decompositions, and the passes that clean a graph before it is lowered."""
