import subprocess
import sys

PROGRAM = """
import sys
from core_plugin.types import DataPlugin, ModelPlugin, OptimizerPlugin, SchedulerPlugin

routes = [
    ModelPlugin("decoder"), DataPlugin("text"), DataPlugin("jsonl"),
    *map(OptimizerPlugin, ("adamw", "sgd")),
    *map(SchedulerPlugin, ("constant", "linear", "cosine", "wsd")),
]
for route in routes:
    route.parse_params({"path": "x"} if route.name == "jsonl" else {}, route.params_type())
print(*sorted({"torch", "numpy", "tokenizers", "safetensors"} & sys.modules.keys()))
"""


def test_parameters_are_parsed_without_anything_heavy():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr
