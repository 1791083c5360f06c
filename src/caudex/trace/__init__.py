"""Floor 1: the one request log format, with its readers, writers and workload generators.

`open_log` reads a log of any known kind as Arrow batches (`caudex.trace.log`); `LogReader` gives its requests before
they are tokenised; `generate` writes seeded ones. Nothing here knows what a cache is.
"""
