"""Kits that hold anybody's service to its contract, over the wire: `rolecall conformance ADDRESS`.

A check is one function with the rule it holds beside it (check.py); a kit is a tuple of them over a session, one folder
for each contract (`reward`). Knows no torch, and of a service only what its contract says.
"""
