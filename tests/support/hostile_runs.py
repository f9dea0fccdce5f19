"""Run directories as an attacker would send them: one field replaced by hostile text, the checksum computed anew."""

import json
import shutil
import tomllib
from copy import deepcopy

import pandas as pd
import tomli_w

from mooring.runs.atomic_files import BLANK_CHECKSUM, read_json, read_parquet, with_checksum, write_json, write_parquet
from mooring.runs.tensor_files import read_tensors, write_tensors

CANARY = "CANARY"  # in every text that could name or run something
COMMAND = f"__import__('os').system('touch {CANARY}')"
VALUES = {
    "code": COMMAND,
    "file and function": f"{CANARY}.py:make",
    "path": f"../../{CANARY}",
    "absolute path": f"/etc/{CANARY}",
    "template": "{{7*7}}{% import 'os' %}" + CANARY,
    "script": f"<script>{CANARY}</script>",
    "escapes": f"\x1b]0;{CANARY}\x07\x1b[2J\x9b[red]",
    "formula": f"y ~ {COMMAND}",
    "long": CANARY + "x" * 100_000,
    "nested": [[[[COMMAND]]], {CANARY: [COMMAND]}],
    "number": -(10**12),
    "deep": {"a": {"b": {"c": COMMAND}}},
    "nothing": None,
}


def places(value, path=()):
    """Yield the path of every field; of a list the first item stands for the others."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            if not path and key == "seal":
                continue
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def replaced(value, path, new):
    """Return the value with another one at a path."""
    if not path:
        return new
    out = deepcopy(value)
    parent = out
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = new
    return out


def content_of(file):
    """The fields of a file of a run directory; None if it has none that can be replaced."""
    match file.suffix:
        case ".json":
            return read_json(file)
        case ".toml":
            return tomllib.loads(file.read_text())
        case ".safetensors":
            tensors, meta = read_tensors(file)
            return {"meta": meta, "names": {name: name for name in tensors}}
        case ".parquet":
            frame = read_parquet(file)
            return {"columns": {name: name for name in frame}, "values": frame.head(1).to_dict("list")}
    return None


def write_hostile(file, path, new):
    """Replace one field of a file, and compute its checksum anew; False if the format cannot hold the value."""
    try:
        match file.suffix:
            case ".json":
                write_json(file, replaced(read_json(file), path, new))
            case ".toml":
                table = replaced(tomllib.loads(file.read_text()), path, new)
                table["mooring"] = (
                    table["mooring"] | {"seal": BLANK_CHECKSUM} if isinstance(table["mooring"], dict) else 1
                )
                file.write_bytes(with_checksum(tomli_w.dumps(table).encode()))
            case ".safetensors":
                tensors, meta = read_tensors(file)
                if path[0] == "names" and len(path) == 2:
                    tensors[str(new)[:1000]] = tensors.pop(path[1])
                else:
                    meta = replaced({"meta": meta}, path, new)["meta"]
                write_tensors(file, tensors, meta)
            case ".parquet":
                frame = read_parquet(file)
                if path[0] == "columns" and len(path) == 2:
                    frame = frame.rename(columns={path[1]: str(new)})
                elif path[0] == "values" and len(path) == 2:
                    frame = frame.assign(**{path[1]: [new if isinstance(new, int) else str(new)] * len(frame)})
                else:
                    frame = pd.DataFrame({"x": [1]})
                write_parquet(file, frame)
    except (TypeError, KeyError, ValueError, OverflowError):
        return False
    return True


def cases(folder):
    """Yield (file, path, name of the value) for every field of a run directory."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = content_of(file)
        if content is not None:
            for path in places(content):
                for name in VALUES:
                    yield file.relative_to(folder), path, name


def hostile_copy(folder, out, file, path, name):
    """Copy a run directory with one field replaced; whether the format can hold the value."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out)
    return write_hostile(out / file, path, VALUES[name])


def show(file, path, name):
    return f"{file} {json.dumps(path)} = {name}"
