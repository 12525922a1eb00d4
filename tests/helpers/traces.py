"""The conversation trace that was published with the Mooncake paper (FAST'25, Apache-2.0): its first 160 requests, and its whole hour.

tests/data/conversation_hour.txt.xz has a line a request: timestamp in ms, input and output tokens, and its block ids as runs
"first+count". That is a thirtieth of the JSON lines, which `write_hour` makes of it again.
"""

import json
import lzma
from pathlib import Path

_DATA = Path(__file__).parents[1] / "data"
FIRST_160 = _DATA / "conversation_trace.jsonl"
HOUR_REQUESTS, HOUR_BLOCKS = 12_031, 182_790


def write_hour(path: Path) -> Path:
    """Writes the hour as JSON lines; returns the path."""
    with lzma.open(_DATA / "conversation_hour.txt.xz", "rt") as lines, path.open("w") as out:
        for line in lines:
            timestamp, input_tokens, output_tokens, *runs = line.split()
            blocks: list[int] = []
            for run in runs:
                first, count = map(int, run.split("+"))
                blocks += range(first, first + count)
            request = {"timestamp": int(timestamp), "input_length": int(input_tokens), "output_length": int(output_tokens)}
            out.write(json.dumps(request | {"hash_ids": blocks}) + "\n")
    return path
