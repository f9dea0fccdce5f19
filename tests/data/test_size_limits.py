"""Small files that unpack to very much are refused, whatever packs them, before they fill the memory."""

import gzip
import io
import tracemalloc
import zipfile

import numpy as np
import pytest

from mooring.core.errors import RequestError
from mooring.data import array_tables, file_readers
from mooring.data.table_sources import read_source

LIMIT_BYTES = 1_000_000
UNPACKED_BYTES = 200_000_000


def pack_gzip(path):
    path.write_bytes(gzip.compress(b"client,x,y\n" + b"a,1,2\n" * (UNPACKED_BYTES // 6), compresslevel=1))


def pack_zip(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/worksheets/sheet1.xml", bytes(UNPACKED_BYTES))


def pack_arrays(path):
    content = io.BytesIO()
    np.savez_compressed(content, x=np.zeros(UNPACKED_BYTES // 8), y=np.zeros(3))
    path.write_bytes(content.getvalue())


@pytest.mark.parametrize("name, pack", [("t.csv.gz", pack_gzip), ("t.xlsx", pack_zip), ("t.npz", pack_arrays)])
def test_a_file_that_unpacks_to_too_much_is_refused_unread(name, pack, tmp_path, monkeypatch):
    path = tmp_path / name
    pack(path)
    assert path.stat().st_size < LIMIT_BYTES
    for module in (file_readers, array_tables):
        monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", LIMIT_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(
            RequestError, match=f"{name}: unpacks to more than 1,000,000 bytes.*MOORING_MAX_UNPACKED_BYTES"
        ):
            read_source(path)
        assert tracemalloc.get_traced_memory()[1] < UNPACKED_BYTES / 4
    finally:
        tracemalloc.stop()
