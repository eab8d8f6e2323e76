"""INPO: preference games, in a table and with a small neural policy (Zhang et al., arXiv 2407.00617)."""
