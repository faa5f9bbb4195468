"""The byte formats load neither torch nor, until a value of it is at hand, NumPy."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from shardkeep.format import digests, hf_index, shard, values
json = values.encode_value({"a": [1, 2.5, (b"x", {1})]}, "v")
assert values.decode_value(json, "v") == {"a": [1, 2.5, (b"x", {1})]}
shard.plan_shard([("a", "float32", (2,))])
loaded = {"torch", "numpy"} & set(sys.modules)
assert not loaded, loaded
values.decode_value({"$npscalar": ["<f4", "AACAPw=="]}, "v")
assert "numpy" in sys.modules
assert "torch" not in sys.modules
"""


def test_neither_torch_nor_numpy_is_loaded_before_it_is_needed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
