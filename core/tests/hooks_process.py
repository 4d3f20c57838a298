"""What the tests of hooks run: `hooks_process.py SCENARIO DIRECTORY`.

`watch` drives the hook `progress` as the training loop does; JSON as a third argument says how the
run goes. `stop` ends after a checkpoint. `sample` samples from one model in one process, and on two
of a gloo group, where it is sharded and then replicated.
"""

import json
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pluggy
from tokenizers import Tokenizer

from core_plugin.types import HookPlugin, Run
from core_plugin.types.hook import Events


def events(name, run, **config):
    route = HookPlugin(name)
    manager = pluggy.PluginManager("core_plugin")
    manager.add_hookspecs(Events)
    hook = route(route.parse_params(config, route.params_type()), run)
    if hook is not None:
        manager.register(hook)
    manager.check_pending()
    return manager.hook


def watch(directory, steps, start=0, seconds=0.02, every=2, ends="ends", params=None):
    run = Run(directory, {}, 0, 1, steps, start, None, None, None, step=start)
    hooks = events("progress", run, **(params or {}))
    hooks.on_start(run=run)
    while run.step < steps:
        time.sleep(seconds)
        run.step += 1
        hooks.on_step(run=run)
        metrics = {
            "step": run.step,
            "loss": 10 / run.step,
            "lr": 0.02,
            "tokens_per_second": 12345.6,
        }
        hooks.on_log(run=run, metrics=metrics)
        if run.step % every == 0:
            hooks.on_checkpoint(run=run, path=Path("runs", f"step-{run.step:08d}"))
    if ends == "ends":
        hooks.on_end(run=run)
    if ends == "fails":
        hooks.on_error(run=run, error=ValueError("no"))
    print("the run is over", flush=True)


def stop(directory):
    """As a run that a signal stops: it ends after its last checkpoint, with nothing closed."""
    run = Run(directory, {}, 0, 1, 100, 0, None, None, None)
    hooks = events("tensorboard", run)
    for run.step in range(1, 51):
        hooks.on_log(run=run, metrics={"step": run.step, "loss": 1.0, "lr": 0.5})
    hooks.on_checkpoint(run=run, path=directory)
    os._exit(0)


def sample_on_a_rank(rank, directory):
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    sharded = decoder()
    for block in sharded.model.layers:
        fully_shard(block)
    models = {"fsdp2": fully_shard(sharded), "ddp": DistributedDataParallel(decoder())}
    for name, model in models.items():
        sample_from(model, directory / name, rank, 2)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def decoder():
    import torch

    from core_plugin.builtin.decoder import Decoder

    torch.manual_seed(0)
    model = Decoder.build(Decoder.Params(hidden_size=32, layers=2, heads=2), 257)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def sample_from(model, directory, rank, world_size):
    import torch

    directory.mkdir(exist_ok=True)
    tokenizer = Tokenizer.from_file(str(directory.parent / "tokenizer.json"))
    device = torch.device("cpu")
    run = Run(directory, {}, rank, world_size, 3, 0, model, device, tokenizer, step=3)
    events("sample", run, prompt="once", tokens=24, context=16).on_end(run=run)


def sample(directory):
    import torch.multiprocessing as mp

    sample_from(decoder(), directory / "alone", 0, 1)
    mp.start_processes(sample_on_a_rank, (directory,), nprocs=2, start_method="fork")


if __name__ == "__main__":
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    if scenario == "watch":
        watch(folder, **json.loads(sys.argv[3]))
    elif scenario == "stop":
        stop(folder)
    else:
        sample(folder)
