"""Floor 5: the pages and tables people look at."""
