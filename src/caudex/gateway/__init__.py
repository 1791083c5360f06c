"""Floor 5: the HTTP face of routing.

A request's way through: `ClientConnection` reads it whole -> `Gateway.handle` authenticates, admits and describes it ->
the policy ranks the workers -> `Relay` sends it to the first, and on failure before the first byte to the next ->
what the worker answers is written to the client as it arrives.

No decision is made here: policies live in caudex.routing. Everything runs on one event loop.
"""
