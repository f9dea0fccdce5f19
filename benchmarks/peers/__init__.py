"""Other libraries at the same work, each in an environment of its own; `protocol.py` defines the messages."""
