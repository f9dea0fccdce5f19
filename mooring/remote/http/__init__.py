"""The default transport: HTTPS between a server's single process and its clients.

signatures.py  every request is signed by an enrolled key; a request that was sent before is refused
mailbox.py     messages and replies in the server's memory
server.py      the HTTP service, in a thread beside the run
client.py      a client's connection
"""
