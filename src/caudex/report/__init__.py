"""Floor 5: the pages and tables people look at. It shows what `caudex.analysis` found and computes nothing."""
