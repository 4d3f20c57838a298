"""Run as a process: how much memory an export takes that the process did not have before."""

import re
import sys
from pathlib import Path

from core_plugin.training.export import export


def kilobytes(field: str) -> int:
    return int(re.search(rf"^{field}:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)[1])


small, large, directory, shard_size = sys.argv[1:]
export(Path(small), Path(directory, "small"))  # imports all that it needs
before = kilobytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
export(Path(large), Path(directory, "large"), shard_size=int(shard_size))
print((kilobytes("VmHWM") - before) * 1024)
