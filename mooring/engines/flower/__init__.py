"""The exchange across machines: the same round loop, with clients behind Flower (`flwr`, an extra).

packing.py      a parcel of words and tensors as Flower records, and back
home.py         what a client answers; its rows and its personal state stay in its own folder
verdict.py      what a client's own test rows say of its model
post.py         letters to clients and their replies: who is where, deadlines, what came too late
exchange.py     `engines/exchange.py`'s contract over the post
conversation.py a whole run as the server leads it: agree on a schema, call the roll, fit, say goodbye
client_app.py, server_app.py   the two Flower apps
replies.py      a client's reply to a message of Flower
door.py         where Flower's own node brings letters to the client
node.py         a client's node in this process, which runs no code that the server sends
secure.py       secure sums: the protocol; secure_client.py, secure_server.py   its two parties
started.py      Flower's processes: the SuperLink behind its guard, stock nodes
on_ray.py       Flower's own simulation instead of processes
keys.py         certificates and client keys
processes.py    processes that are started, watched and ended
superlink.py    Flower's SuperLink, and what is asked of it
app_files.py    the Flower app of a run, as files
joining.py      what the command join does
federation.py   what the commands serve and federation up start and stop
"""
