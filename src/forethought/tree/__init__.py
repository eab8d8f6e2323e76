"""Experience as token trees: the structure, its packing, its credit and its store."""
