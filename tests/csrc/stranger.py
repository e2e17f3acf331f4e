"""Reads a trace by docs/trace-format.md alone, and LZ4 blocks with the real lz4.

A second reader, written from the page and not from the code, shows that the page says enough. Run
by ctest where Python has the `lz4` package:  stranger.py CODEC_TOOL CORPUS
"""

import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import lz4.block

MAGIC = bytes.fromhex("89505954 0D0A1A0A")
SYNC = bytes.fromhex("C47E910DF35A0AE8")
TABLES = {
    1: ("meta", "text"),
    2: ("clock", "ticks", "unix_ns"),
    3: ("strings", "lengths", "text"),
    4: ("stacks", "parent", "file", "function", "line"),
    5: ("places", "stream", "pool_high", "pool_low", "device_type", "device_index"),
    6: ("labels", "category", "role", "name", "shape", "dtype"),
    7: ("threads", "native_id", "name"),
    8: ("losses", "name", "count"),
    9: ("events", "ticks", "address", "bytes", "action", "scope", "place", "thread"),
    10: ("scope_begins", "ticks", "parent", "forward", "name", "thread", "kind", "flags"),
    11: ("scope_ends", "ticks", "scope", "stack"),
    12: ("end", "table", "rows"),
    13: ("flushes", "chain"),
}


def decode(data, width, filters, codec, size):
    if codec == 1:
        data = lz4.block.decompress(data, uncompressed_size=size)
    assert len(data) == size
    if width == 0:
        return data
    rows = size // width
    if filters & 2:
        data = bytes(data[b * rows + i] for i in range(rows) for b in range(width))
    items = [int.from_bytes(data[i : i + width], "little") for i in range(0, size, width)]
    if filters & 1:
        item = 0
        for i, z in enumerate(items):
            item = (item + ((z >> 1) ^ -(z & 1))) % (1 << 8 * width)
            items[i] = item
    return items


def read(data):
    """The chunks of an undamaged file, as far as it may be believed."""
    assert data[:8] == MAGIC
    major, minor, crc = struct.unpack_from("<HHI", data, 8)
    assert major == 1
    assert crc == zlib.crc32(data[:12])
    at = 16
    chunks = []
    whole = chain = 0
    while at < len(data):
        head = data[at : at + 36]
        assert head[:8] == SYNC
        table, columns, flags, rows, first, size, payload_crc, head_crc = struct.unpack_from(
            "<HBBIQIII", head, 8
        )
        assert flags == 0
        assert zlib.crc32(head[:32]) == head_crc
        payload = data[at + 36 : at + 36 + size]
        assert zlib.crc32(payload) == payload_crc
        found = {}
        where = 0
        for _ in range(columns):
            number, width, filters, codec, raw, encoded = struct.unpack_from(
                "<BBBBII", payload, where
            )
            where += 12
            found[TABLES[table][number]] = decode(
                payload[where : where + encoded], width, filters, codec, raw
            )
            where += encoded
        assert where == size
        if table == 13:
            assert found["chain"] == [chain]
        chunks.append((TABLES[table][0], rows, first, found))
        if table in (12, 13) or minor == 0:
            whole = len(chunks)
        chain = zlib.crc32(head[32:], chain)
        at += 36 + size
    return chunks[:whole]


def check_trace(path):
    """The trace is make_corpus's "whole", of this version or of 1.0: see tests/csrc/samples.h."""
    chunks = read(path.read_bytes())
    tables = {name: columns for name, _, _, columns in chunks}
    assert tables["meta"]["text"] == b'{"title": "new"}'
    assert tables["clock"]["ticks"] == [5000]
    text, strings = tables["strings"]["text"], []
    for length in tables["strings"]["lengths"]:
        strings.append(text[:length].decode())
        text = text[length:]
    assert strings == ["", "aten::mm", "train.py", "main", "wéight", "lost_alloc"]
    assert tables["stacks"]["line"] == [0, 10, 12]
    assert tables["places"]["stream"] == [0, 7]
    assert tables["losses"] == {"name": [5], "count": [4]}
    assert tables["scope_begins"]["flags"] == [0, 1]
    events = tables["events"]
    assert events["ticks"] == [1000 + 37 * i for i in range(40)]
    assert events["address"] == [0x7F0000000000 + i // 2 * 4096 for i in range(40)]
    assert events["bytes"] == [512 * (i % 7 + 1) for i in range(40)]
    assert chunks[-1][0] == "end"
    totals = dict(zip(*tables["end"].values(), strict=True))
    assert totals[9] == 40
    assert totals[3] == 6


def check_cut(path):
    """Cut between any two chunks, the trace is as it was when the last flush before ended."""
    data = path.read_bytes()
    at, whole = 16, 0
    for number, (name, _, _, _) in enumerate(read(data), 1):
        assert len(read(data[:at])) == whole
        at += 36 + struct.unpack_from("<I", data, at + 24)[0]
        if name in ("flushes", "end"):
            whole = number


def check_lz4(tool):
    def ours(action, data):
        return subprocess.run([tool, *action], input=data, capture_output=True, check=True).stdout

    rng = random.Random(1)
    samples = [b"", b"a", b"abc" * 4, bytes(100000), rng.randbytes(5000)]
    samples += [
        bytes(rng.choices(range(values), k=size))
        for values in (2, 3, 10, 100)
        for size in (13, 100, 1000, 70000, 200000)
    ]
    samples.append(b"".join(b"step %d loss %f\n" % (i, i / 7) for i in range(20000)))
    for raw in samples:
        packed = ours(["compress"], raw)
        assert lz4.block.decompress(packed, uncompressed_size=len(raw)) == raw
        for mode in ("default", "fast", "high_compression"):
            packed = lz4.block.compress(raw, mode=mode, store_size=False)
            assert ours(["decompress", str(len(raw))], packed) == raw


if __name__ == "__main__":
    check_lz4(sys.argv[1])
    corpus = Path(sys.argv[2])
    for name in ("whole", "whole_1_0"):
        check_trace(corpus / name)
    check_cut(corpus / "whole")
