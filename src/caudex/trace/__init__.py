"""Floor 1: the one request log format, with its readers, writers and workload generators."""
