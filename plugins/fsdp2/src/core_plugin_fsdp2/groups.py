"""What is sharded apart from the rest of a block, or together with a part of another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from core_plugin.errors import ConfigError
from core_plugin.tensors import is_sharded


def tied_groups(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The modules to shard together since parameters of theirs are in several blocks.

    Parameters that are tied within a block, or outside of all of them, are in one group anyway.

    Raises:
        ConfigError: One of the modules has blocks in it.
    """
    within = _blocks_around(model, blocks)
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in within:
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append(module)
    groups: list[list[nn.Module]] = []
    for modules in holders.values():
        if len(set().union(*(within[module] for module in modules))) > 1:
            touched = [group for group in groups if not set(group).isdisjoint(modules)]
            merged = dict.fromkeys([*(m for group in touched for m in group), *modules])
            groups = [*(group for group in groups if group not in touched), list(merged)]
    for module in (m for group in groups for m in group):
        if any(inner in blocks for inner in list(module.modules())[1:]):
            raise ConfigError(
                f"fsdp2: a {type(module).__name__} has blocks in it, and a parameter of its own is "
                "in one of them, too; put it into a module beside the blocks"
            )
    return groups


def _blocks_around(
    model: nn.Module, blocks: Sequence[nn.Module]
) -> dict[nn.Module, set[nn.Module]]:
    """The innermost blocks that each module is in; the model stands for none."""
    found: dict[nn.Module, set[nn.Module]] = {}

    def visit(module: nn.Module, block: nn.Module) -> None:
        block = module if module in blocks else block
        found.setdefault(module, set()).add(block)
        for child in module.children():
            visit(child, block)

    visit(model, model)
    return found


def trained_dtype_groups(part: nn.Module) -> list[nn.Module]:
    """The modules to shard one by one so that no group trains parameters of two dtypes.

    ``fully_shard`` needs one original dtype among a group's trained parameters; the dtypes that
    differ from the part's own, as those of adapters in a half-precision model, get groups of
    their own.
    """
    trained = [
        (module, parameter.dtype)
        for module in part.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad and not is_sharded(parameter)
    ]
    odd = (module for module, dtype in trained if dtype != trained[0][1])
    return [*(module for module in dict.fromkeys(odd) if module is not part), part]
