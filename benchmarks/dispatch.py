"""The cost of calling a plugin: a bound implementation and a route against a direct call.

Each way is timed in a process of its own, together with the direct call of the same function there;
pluggy's hook with one implementation, and catalogue's ``get`` and call, for comparison.
"""

from __future__ import annotations

import argparse
import functools
import sys

from common import in_turns, machine, output, spread, table

OPTIMIZER = """
from core_plugin.types import OptimizerPlugin
OptimizerPlugin("bench").register()(optimizer)
"""
STRATEGY = """
from core_plugin.types import DistributedPlugin
route = DistributedPlugin("none")
"""
PLUGGY = """
import pluggy
class Specification:
    @pluggy.HookspecMarker("bench")
    def optimizer(self, model, params): ...
class Plugin:
    @pluggy.HookimplMarker("bench")
    def optimizer(self, model, params):
        return params
manager = pluggy.PluginManager("bench")
manager.add_hookspecs(Specification)
manager.register(Plugin())
hook = manager.hook
"""
CATALOGUE = """
import catalogue
registry = catalogue.create("bench", "optimizer", entry_points={})
registry.register("bench", func=optimizer)
"""

WAYS = {
    "implementation, resolved and bound": (
        OPTIMIZER + "bound = OptimizerPlugin('bench').resolve()",
        "bound(None, 1)",
    ),
    "method, resolved and bound": (STRATEGY + "bound = route.resolve().unwrap_model", "bound(1)"),
    "route that is kept": (OPTIMIZER + "route = OptimizerPlugin('bench')", "route(None, 1)"),
    "route that is made for the call": (OPTIMIZER, "OptimizerPlugin('bench')(None, 1)"),
    "method of a route that is kept": (STRATEGY, "route.unwrap_model(1)"),
    "pluggy hook, one implementation": (PLUGGY, "hook.optimizer(model=None, params=1)"),
    "catalogue, without entry points": (CATALOGUE.format(False), "registry.get('bench')(None, 1)"),
    "catalogue, with entry points": (CATALOGUE.format(True), "registry.get('bench')(None, 1)"),
}

CHILD = """
import timeit
def optimizer(model, params):
    return params
{setup}
for statement in ({statement!r}, "optimizer(None, 1)"):
    timer = timeit.Timer(statement, globals=globals())
    number = max(timer.autorange()[0] // 20, 1)
    print(1e9 * min(timer.repeat(20, number)) / number)
"""


def time_one(way: str) -> tuple[float, float]:
    """Nanoseconds of a call in this way, and of a direct one."""
    setup, statement = WAYS[way]
    child = CHILD.format(setup=setup, statement=statement)
    ours, direct = output([sys.executable, "-c", child]).split()
    return float(ours), float(direct)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(machine())
    results = in_turns({way: functools.partial(time_one, way) for way in WAYS}, options.repeats)
    rows = []
    for way, times in results.items():
        ours, direct = zip(*times, strict=True)
        ratios = [a / b for a, b in times]
        rows.append([way, spread(ours, 0), spread(direct, 0), spread(ratios)])
    table(
        f"A call: nanoseconds, minimum / median of {options.repeats} processes",
        ["way", "call", "direct call", "ratio"],
        rows,
    )


if __name__ == "__main__":
    main()
