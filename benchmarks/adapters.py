"""Adapters: core-plugin's engine and LoRA against the peft library's.

Injection into models on ``meta``; a training step over a frozen model, its time and the growth of
its memory; merging in float32 and bfloat16; and the import. Both libraries work on models of one
make, in turns, on one thread.

Goals: ``all-linear`` into 20,000 layers at most 0.15 times, two names at most 0.1, a second
adapter linear in the size; at most half of peft's surcharge on a step and 0.6 times the growth of
its memory; a merge at most 0.5 times, in bfloat16 0.4; an import at most 0.3 s more than torch's.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import cpu_seconds, in_turns, machine, output, ratio, spread, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

RANK = 16
LIBRARIES = ("core-plugin", "peft")
TWO_NAMES = ["q_proj", "v_proj"]
VARIANTS: dict[str, str | list[str] | None] = {
    "frozen model": None,
    "two names": TWO_NAMES,
    "all-linear": "all-linear",
}


def ours(model: nn.Module, targets: str | Sequence[str], name: str = "default") -> nn.Module:
    """The model with core-plugin's LoRA."""
    from core_plugin.adapters import add_adapter, inject
    from core_plugin_lora.plugin import LoRA, LoRAParams

    params = LoRAParams(target_modules=targets, r=RANK, lora_alpha=2 * RANK)
    if name == "default":
        return inject(model, LoRA, params, name)
    add_adapter(model, LoRA, params, name)
    return model


def theirs(model: nn.Module, targets: str | Sequence[str], name: str = "default") -> nn.Module:
    """The model with peft's LoRA; without memory for an adapter of a model without memory.

    It is made as its users do, so that its adapters are float32 too where the model is bfloat16.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(target_modules=targets, r=RANK, lora_alpha=2 * RANK)
    on_meta = next(model.parameters()).is_meta
    if isinstance(model, PeftModel):
        model.add_adapter(name, config, low_cpu_mem_usage=on_meta)
        return model
    return get_peft_model(model, config, name, low_cpu_mem_usage=on_meta)


ADAPT = {"core-plugin": ours, "peft": theirs}


def mixture_of_experts(layers: int, experts: int) -> nn.Module:
    """A decoder's modules, whose feed-forward parts have experts, on ``meta``; it never runs."""
    import torch
    from torch import nn

    def linear(*names: str) -> dict[str, nn.Module]:
        return {name: nn.Linear(64, 64, bias=False) for name in names}

    def block() -> nn.Module:
        attention = nn.ModuleDict(linear("q_proj", "k_proj", "v_proj", "o_proj"))
        mixture = nn.ModuleDict(linear("gate"))
        mixture["experts"] = nn.ModuleList(
            nn.ModuleDict(linear("gate_proj", "up_proj", "down_proj")) for _ in range(experts)
        )
        return nn.ModuleDict({"self_attn": attention, "mlp": mixture})

    with torch.device("meta"):
        return nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(layers))})


def cpu(function: Callable[[], Any]) -> float:
    """CPU seconds of a call."""
    gc.collect()
    start = time.process_time()
    function()
    return time.process_time() - start


def injection(repeats: int) -> None:
    """Print the times of injecting into a large mixture of experts."""
    layers, experts = 52, 128
    rows = []
    for title, targets in list(VARIANTS.items())[1:]:
        times = in_turns(
            {
                library: lambda adapt=adapt, targets=targets: timed_injection(
                    adapt, targets, layers, experts
                )
                for library, adapt in ADAPT.items()
            },
            repeats,
        )
        rows.append(compared(title, times, 3))
    count = layers * (5 + 3 * experts)
    table(f"Injection into {count:,} linear layers on meta: CPU seconds", HEADER, rows)

    rows = []
    for layers in (4, 8, 16, 32):
        times = in_turns(
            {
                library: lambda adapt=adapt, layers=layers: timed_second(adapt, layers)
                for library, adapt in ADAPT.items()
            },
            1,
        )
        rows.append(compared(f"{layers * (5 + 3 * 32):,} layers", times, 3))
    table("A second adapter on all linear layers: CPU seconds", HEADER, rows)


HEADER = ("what", *LIBRARIES, "ratio")


def compared(title: str, results: dict[str, list[float]], digits: int) -> list[str]:
    mine, other = (results[library] for library in LIBRARIES)
    return [title, spread(mine, digits), spread(other, digits), ratio(mine, other)]


def timed_injection(adapt: Callable, targets: Any, layers: int, experts: int) -> float:
    model = mixture_of_experts(layers, experts)
    return cpu(lambda: adapt(model, targets))


def timed_second(adapt: Callable, layers: int) -> float:
    model = adapt(mixture_of_experts(layers, 32), "all-linear")
    return cpu(lambda: adapt(model, "all-linear", "second"))


# A training step


def llama(dtype: str = "float32") -> nn.Module:
    """A small Llama of Hugging Face's, frozen, through which gradients flow."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).requires_grad_(False)
    model.enable_input_require_grads()
    return model


def stepper(library: str, targets: Any, dtype: str = "float32") -> Callable[..., None]:
    """A forward and backward pass of 4 x 256 tokens, or so many."""
    import torch

    model = llama(dtype)
    if targets is not None:
        model = ADAPT[library](model, targets)
    model.train()
    tokens = torch.randint(0, 2048, (4, 256), generator=torch.Generator().manual_seed(0))

    def step(sequences: int = 4, length: int = 256) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        some = tokens[:sequences, :length]
        model(input_ids=some, labels=some).loss.backward()

    return step


def step_time(repeats: int) -> None:
    """Print the times of a step, as ratios to the frozen model's."""
    steps = {("frozen model", ""): stepper("", None)}
    for title, targets in list(VARIANTS.items())[1:]:
        for library in LIBRARIES:
            steps[title, library] = stepper(library, targets)
    times = in_turns({key: lambda step=step: cpu(step) for key, step in steps.items()}, repeats)
    base = times["frozen model", ""]
    rows = [["frozen model", "", spread((1000 * t for t in base), 0), "1", ""]]
    for (title, library), values in list(times.items())[1:]:
        over = min(values) / min(base) - 1
        cells = [title, library, spread((1000 * t for t in values), 0), ratio(values, base)]
        rows.append([*cells, f"{over:.3f}"])
    table(
        "A step over a frozen Llama, 8 layers of 512: CPU milliseconds",
        ("targets", "library", "time", "of the frozen model's", "surcharge"),
        rows,
    )


def step_memory(repeats: int) -> None:
    """Print how much memory a step takes over what the model takes, each in a process.

    The system's allocator keeps much of what is freed in between, more in some processes than in
    others. What is alive at once is seen where it gives all tensors back.
    """
    ways = {
        "resident": ({}, repeats),
        "alive at once": ({"MALLOC_MMAP_THRESHOLD_": "65536"}, 1),
    }
    for name, (env, times) in ways.items():
        rows = []
        for dtype in ("float32", "bfloat16"):
            for title in VARIANTS:
                measures = {
                    library: functools.partial(growth, library, title, dtype, env)
                    for library in LIBRARIES
                }
                grown = in_turns(measures, times)
                rows.append(compared(f"{title}, {dtype}", grown, 0))
        table(f"The growth of memory in a step, {name}: MiB", HEADER, rows)


def growth(library: str, title: str, dtype: str, env: Mapping[str, str]) -> float:
    command = [sys.executable, __file__, "--memory-of", library, title, dtype]
    return float(output(command, {"OMP_NUM_THREADS": "1", **env}))


def memory_of(library: str, title: str, dtype: str) -> None:
    """Print the growth of the resident memory in a step, in MiB; a short one comes before it."""
    step = stepper(library, VARIANTS[title], dtype)
    step(1, 8)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    step()
    print(resident("VmHWM") - before)


def resident(which: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


# Merging


def merging(repeats: int) -> None:
    """Print the times of merging into 28 layers of 45 million weights.

    peft merges in place, and takes the merged back by subtraction, which is not exact; so its
    merge has two peers here: one in place, and one with an exact way back.
    """
    import torch

    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        mine = random_adapter(ours(large_layers(dtype), "all-linear"))
        other = random_adapter(theirs(large_layers(dtype), ".*"))
        for title, ways in MERGES.items():
            times = in_turns(
                {
                    library: lambda way=way, adapted=adapted: timed_merge(way, adapted)
                    for (library, way), adapted in zip(ways.items(), (mine, other), strict=True)
                },
                repeats,
            )
            name = str(dtype).removeprefix("torch.")
            rows.append(compared(f"{title}, {name}", times, 0))
    table("Merging into 28 layers, 45 million weights: CPU milliseconds", HEADER, rows)


def timed_merge(way: Callable[[nn.Module], None], adapted: nn.Module) -> float:
    model = copy.deepcopy(adapted)
    return 1000 * cpu(lambda: way(model))


def merge_in_place(model: nn.Module) -> None:
    from core_plugin.adapters import merge

    merge(model, keep=False)


def merge_and_back(model: nn.Module) -> None:
    from core_plugin.adapters import merge, unmerge

    merge(model)
    unmerge(model)


def merge_safely(model: nn.Module) -> None:
    from core_plugin.adapters import merge

    merge(model, safe=True)


def of_peft(*steps: str, **options: bool) -> Callable[[nn.Module], None]:
    """Methods of peft's layers, called one after the other on all of them."""

    def way(model: nn.Module) -> None:
        layers = [module for module in model.modules() if hasattr(module, "unmerge")]
        for step in steps:
            for layer in layers:
                getattr(layer, step)(**(options if step == "merge" else {}))

    return way


MERGES = {
    "merge, in place": {"core-plugin": merge_in_place, "peft": of_peft("merge")},
    "merge and unmerge": {"core-plugin": merge_and_back, "peft": of_peft("merge", "unmerge")},
    "safe merge": {"core-plugin": merge_safely, "peft": of_peft("merge", safe_merge=True)},
}


def large_layers(dtype: Any) -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(0)
    shapes = [(1024, 1024)] * 16 + [(1024, 2368)] * 12
    return nn.Sequential(*(nn.Linear(*shape, bias=False, dtype=dtype) for shape in shapes))


def random_adapter(model: nn.Module) -> nn.Module:
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def importing(repeats: int) -> None:
    """Print the CPU seconds of an import over those of torch's alone."""
    ours = "import torch, core_plugin.adapters, core_plugin_lora.plugin, core_plugin_lora.linear"
    imports = {"torch": "import torch", "core-plugin": ours, "peft": "import torch, peft"}
    times = in_turns(
        {
            k: lambda code=code: cpu_seconds([sys.executable, "-c", code])
            for k, code in imports.items()
        },
        repeats,
    )
    torch_alone = min(times["torch"])
    rows = [[k, spread(v, 2), f"{min(v) - torch_alone:.2f}"] for k, v in times.items()]
    table("Import: CPU seconds", ("what", "time", "over torch"), rows)


PARTS = {
    "injection": lambda repeats: injection(min(repeats, 3)),
    "time": step_time,
    "memory": lambda repeats: step_memory(min(repeats, 3)),
    "merging": merging,
    "import": lambda repeats: importing(min(repeats, 5)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"which of {', '.join(PARTS)}; all if none")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if arguments.memory_of:
        memory_of(*arguments.memory_of)
        return
    print(machine())
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.repeats)


if __name__ == "__main__":
    main()
