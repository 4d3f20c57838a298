"""What tox runs: install core and all that it requires but torch, and run the tests that need none.

Test files that carry no ``torchfree`` mark are not even imported, since most import torch.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

CORE = Path("core")
PROJECT = tomllib.loads((CORE / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(module: str, *arguments: object) -> None:
    done = subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=False)
    if done.returncode:
        sys.exit(done.returncode)


light = [r for r in PROJECT["dependencies"] if not re.match(r"torch\b", r)]
run("pip", "install", "--quiet", *light)
run("pip", "install", "--quiet", "--no-deps", "--editable", CORE)
files = [f for f in sorted(CORE.glob("tests/test_*.py")) if "torchfree" in f.read_text("utf-8")]
run("pytest", "-m", "torchfree", *files, *sys.argv[1:])
