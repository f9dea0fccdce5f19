"""The default transport: HTTPS between a server's single process and its clients.

signatures.py  every request is signed by an enrolled key; a request that was sent before is refused
mailbox.py     messages and replies in the server's memory
server.py      the HTTP service, in a thread beside the run
client.py      a client's connection
"""

from importlib.util import find_spec

from mooring.core.errors import RequestError

MISSING = [name for name in ("cryptography", "httpx", "starlette", "uvicorn") if find_spec(name) is None]
if MISSING:
    raise RequestError(f"a federation across machines needs {MISSING[0]}: pip install 'mooring-fl[federation]'.")
