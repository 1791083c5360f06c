"""Floor 3: where a request should go. Policies and the view of the fleet they decide on; no HTTP, no clock, no threads.

A decision is a straight line: the caller describes the prompt (`RouteRequest`), a `Policy` ranks the workers of a
`Fleet` for it (`Ranking`), the caller sends the request and tells both what happened. Time is passed in, so the same
objects run in the gateway and in the simulator.
"""

from caudex.routing.fleet import Fleet, Flight, LoadReport
from caudex.routing.honesty import HonestyCheck
from caudex.routing.policy import POLICIES, Policy, make_policy
from caudex.routing.ranking import Candidate, Ranking, Reason
from caudex.routing.request import RouteRequest, text_request, token_request

__all__ = [
    "POLICIES",
    "Candidate",
    "Fleet",
    "Flight",
    "HonestyCheck",
    "LoadReport",
    "Policy",
    "Ranking",
    "Reason",
    "RouteRequest",
    "make_policy",
    "text_request",
    "token_request",
]
