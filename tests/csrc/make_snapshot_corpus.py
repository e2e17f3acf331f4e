"""Writes the seeds of fuzz_snapshot's corpus: make_snapshot_corpus.py DIRECTORY."""

import pickle
import sys
from pathlib import Path
from typing import Any


def snapshot(entries: int = 3, protocol: int = 4, **more: Any) -> bytes:
    """A small snapshot as torch writes them."""
    frame = {"name": "forward", "filename": "/x/torch/nn/modules/module.py", "line": 7}
    trace = [
        {
            "action": action,
            "addr": 4096 + 512 * (i // 3),
            "size": 100 + i,
            "stream": 0,
            "time_us": 1_700_000_000_000_000 + i,
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": (0, 0),
            "frames": [frame, {**frame, "line": i}],
        }
        for i in range(entries)
        for action in ("alloc", "free_requested", "free_completed")
    ]
    trace.append({"action": "oom", "device_free": 1, "size": 2, "stream": 0, "frames": []})
    block = {"address": 8192, "size": 512, "requested_size": 400, "state": "active_allocated"}
    segment = {
        "device": 0,
        "address": 8192,
        "total_size": 512,
        "allocated_size": 512,
        "active_size": 512,
        "requested_size": 400,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [frame],
        "blocks": [{**block, "frames": [frame]}],
    }
    annotation = {"name": "Optimizer.step#SGD.step", "stage": "START", "device": 0, "time_us": 5}
    whole = {
        "segments": [segment],
        "device_traces": [trace, []],
        "allocator_settings": {"a": "", "b": 0.5, "c": -1, "d": {"1": 0}, "e": True, "f": None},
        "external_annotations": [annotation, {**annotation, "stage": "END"}],
        **more,
    }
    return pickle.dumps(whole, protocol=protocol)


class Calls:
    """Its pickle runs a function when Python reads it."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


def main() -> None:
    folder = Path(sys.argv[1])
    whole = snapshot()
    history = {"real_size": 7, "frames": [], "addr": 8192}
    old_block = {"size": 512, "state": "active_allocated", "history": [history]}
    old_segment = {"address": 1, "total_size": 512, "stream": 0, "blocks": [old_block]}
    loop: list[Any] = []
    loop.append(loop)
    seeds = {
        "whole": whole,
        "protocol_2": snapshot(protocol=2),
        "protocol_5": snapshot(protocol=5),
        "many_entries": snapshot(40),
        "segments_alone": pickle.dumps([old_segment]),
        "old_blocks": snapshot(segments=[old_segment]),
        "code": snapshot(extra=Calls()),
        "code_protocol_0": pickle.dumps(Calls(), protocol=0),
        "loop": snapshot(device_traces=loop),
        "not_a_dict": pickle.dumps(7),
        "wrong_types": snapshot(device_traces={"a": 1}),
        "wrong_entries": snapshot(device_traces=[[1, "x", None]]),
        "no_sizes": snapshot(device_traces=[[{"action": "alloc"}]]),
        "huge_numbers": snapshot(device_traces=[[{"action": "alloc", "size": 2**63, "addr": 1}]]),
        "surrogates": snapshot(pytracer="\udcff"),
        "memo_bomb": b"\x80\x04Nr\xff\xff\xff\x0f.",
        "deep": b"\x80\x04" + b"(" * 200 + b".",
        "deep_lists": b"\x80\x04" + b"]" * 300 + b"a" * 299 + b".",
        "long_text": b"\x80\x04X\xff\xff\xff\x7f",
        "empty": b"",
        **{f"cut_at_{at}": whole[:at] for at in (1, 2, 10, 100, len(whole) // 2, len(whole) - 1)},
    }
    folder.mkdir(exist_ok=True)
    for name, data in seeds.items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
