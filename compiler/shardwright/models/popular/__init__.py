"""Names of the Hugging Face hub, resolved without it where possible.

shipped.py reads the *.json files here; hub.py asks the local cache, the shipped files and the hub,
in that order.
"""
