"""Federations across machines: the same round loop, with clients behind Flower (`flwr`, an extra).

messages.py        what server and clients send each other, and the checks of replies
messenger.py       the server sends messages and collects replies: nodes, deadlines, late replies
exchange.py        the contract of `engines/exchange.py` over the messenger
server_run.py      a run as the server leads it: agree on a schema, train, send results; the server's Flower app
client_node.py     a client: its run file, table and state
client_requests.py how a client answers each request
client_app.py      the client's Flower app, for Flower's own nodes
compression.py     messages of local updates in fewer bytes
remote_rows.py     client functions that are called by message
ray_simulation.py  Flower's own simulation, on Ray
disclosure.py      what may leave a client (its policy), and records of what was asked and sent
secure_sums.py     secure sums: the protocol, and the server's part
secure_client.py   the client's part in secure sums: what it sends, and what it refuses
gateway.py         the ASGI application in front of Flower's SuperLink
mailbox.py         messages between the server's app and embedded nodes, in the gateway's memory
gateway_grid.py    the grid by which the server's app uses the mailbox
superlink.py       Flower's SuperLink: start it, register keys, submit runs
child_process.py   processes that are started, watched and ended
join.py            `mooring join`: an embedded node, or Flower's own
federation.py      `mooring serve` and `mooring federation up`
keys.py            certificates and keys
flower_patches.py  every use of Flower that is not its public interface
"""

from importlib.util import find_spec

from mooring.core.errors import RequestError

if find_spec("flwr") is None:
    raise RequestError("a federation across machines needs Flower: pip install 'mooring-fl[flower]'.")
