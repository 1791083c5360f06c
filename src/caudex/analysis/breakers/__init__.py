"""What breaks prefixes in a log, where, at what cost, and what mending it would bring.

Detectors propose (they may be generous); the replay of the mended log disposes: what brings nothing is not reported.
"""

from __future__ import annotations

from caudex.analysis.breakers.candidate import Candidate, Example, Place
from caudex.analysis.breakers.search import Finding, find_breakers

__all__ = ["Candidate", "Example", "Finding", "Place", "find_breakers"]
