"""One size, several arms and seeds: the paired experiment and its report."""
