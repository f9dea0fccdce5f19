"""Federations across machines: the same round loop, with clients behind a transport.

transport.py       what carries messages: memory.py (tests), http/ (the default), flower.py (an adapter)
messages.py        what server and clients send each other, as bytes
requests.py        the table of requests: who may ask what, how often, and how replies are checked
messenger.py       the server sends messages and collects replies: nodes, deadlines, late replies
exchange.py        the contract of `engines/exchange.py` over the messenger
server_run.py      a run as the server leads it: agree on a schema, train, send results
client_node.py     a client: its run file, table and state
client_requests.py how a client answers each request
compression.py     messages of local updates in fewer bytes
remote_rows.py     client functions that are called by message
disclosure.py      what may leave a client (its policy), and records of what was asked and sent
secure_sums.py     secure sums: the protocol, and the server's part
secure_client.py   the client's part in secure sums: what it sends, and what it refuses
keys.py            certificates and keys
join.py            `mooring join`
serve.py           `mooring serve` and `mooring federation up`
"""

from importlib.util import find_spec

from mooring.core.errors import RequestError

MISSING = [name for name in ("cryptography", "httpx", "starlette", "uvicorn") if find_spec(name) is None]
if MISSING:
    raise RequestError(f"a federation across machines needs {MISSING[0]}: pip install 'mooring-fl[federation]'.")
