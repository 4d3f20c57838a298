"""FSDP2: a model whose parameters are sharded over the ranks trains as on one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from core_plugin import state, tensors
from core_plugin.testing.device.memory import gives_back
from core_plugin.testing.device.models import (
    MAX_NORM,
    RANKS,
    Network,
    assert_close,
    assert_trained_alike,
    batch,
    gradients,
    loss,
    network,
    parameters,
    reference,
    sharded,
    sum_in_collectives,
    train,
    whole_gradients,
)
from core_plugin.testing.device.subject import Subject

pytestmark = [pytest.mark.level(3), pytest.mark.ranks(RANKS)]


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept_after_forward"])
def test_training_is_that_of_one_process(
    subject: Subject, device: torch.device, rank: int, reshard: bool
) -> None:
    """Three steps of AdamW with clipping give the results of one process."""
    model = sharded(network(), subject, device, reshard_after_forward=reshard)
    assert all(p.device == device for p in model.parameters())
    assert_trained_alike(train(model, batch(rank), device), reference())


@pytest.mark.parametrize("shape", [(1, RANKS), (RANKS, 1)], ids=["1_by_2", "2_by_1"])
def test_training_with_replicas(
    subject: Subject, device: torch.device, rank: int, shape: tuple[int, int]
) -> None:
    """A mesh of replicas and shards gives the results of one process."""
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    model = sharded(network(), subject, device, mesh)
    held = sum(tensors.local(p).numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    assert (held == whole) == (shape[1] == 1), f"a rank holds {held} of {whole} elements"
    assert_trained_alike(train(model, batch(rank), device), reference())


def test_gradients_that_are_summed_and_divided(
    subject: Subject, device: torch.device, rank: int
) -> None:
    """With sums alone in the collectives of every module, gradients are the mean."""
    model = sharded(network(), subject, device)
    sum_in_collectives(model)
    loss(model, batch(rank), device).backward()
    assert_close(gradients(model), whole_gradients())


@pytest.mark.requires("average_in_collectives")
def test_gradients_that_the_library_averages(
    subject: Subject, device: torch.device, rank: int
) -> None:
    """With an average in the collectives, gradients are the same as with sums."""
    averaged, summed = (sharded(network(), subject, device) for _ in range(2))
    sum_in_collectives(summed)
    for module in averaged.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(False)
    loss(averaged, batch(rank), device).backward()
    loss(summed, batch(rank), device).backward()
    assert_close(gradients(averaged), gradients(summed))


def test_computing_in_bf16_and_reducing_in_float32(
    subject: Subject, device: torch.device, rank: int
) -> None:
    """Parameters are bf16 where they are computed with; they and their gradients stay float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(network(), subject, device, mp_policy=policy)
    dtypes: list[torch.dtype] = []
    up = model.blocks[1].get_submodule("up")
    up.register_forward_pre_hook(lambda module, inputs: dtypes.append(module.weight.dtype))
    loss(model, batch(rank), device).backward()
    assert dtypes == [torch.bfloat16]
    assert {t.dtype for p in model.parameters() for t in (p, p.grad) if t is not None} == {
        torch.float32
    }
    expected, actual = whole_gradients(), gradients(model)
    distance = torch.stack([torch.dist(actual[n], expected[n]) for n in expected]).norm()
    whole = torch.stack([g.norm() for g in expected.values()]).norm()
    assert distance < 0.05 * whole, f"gradients are off by {distance / whole:.1%}"


def test_a_model_from_the_meta_device(subject: Subject, device: torch.device, rank: int) -> None:
    """A model that is sharded before it has memory, gets it, and is filled, trains the same."""
    with torch.device("meta"):
        model = Network()
    sharded(model, subject, device).to_empty(device=device)
    values = dict(network().named_parameters())
    for name, parameter in model.named_parameters():
        tensors.copy_full(parameter, values[name].detach())
    assert_close(parameters(model), values)
    assert_trained_alike(train(model, batch(rank), device), reference())


def test_a_block_that_is_unsharded_by_hand(
    subject: Subject, device: torch.device, rank: int
) -> None:
    """``unshard`` gives whole parameters on the device, and ``reshard`` takes them back."""
    model = sharded(network(), subject, device)
    block = model.blocks[0]
    expected = network().blocks[0].get_parameter("up.weight")
    handle = block.unshard(async_op=True)  # type: ignore[operator]
    handle.wait()
    whole = block.get_parameter("up.weight")
    assert not isinstance(whole, DTensor)
    assert whole.device == device
    torch.testing.assert_close(whole.detach().cpu(), expected.detach())
    block.reshard()  # type: ignore[operator]
    part = block.get_parameter("up.weight")
    assert isinstance(part, DTensor)
    torch.testing.assert_close(part.to_local().detach().cpu(), expected.chunk(RANKS)[rank].detach())


@pytest.mark.requires("storage_resize")
def test_whole_parameters_are_freed(subject: Subject, device: torch.device, rank: int) -> None:
    """The memory of whole parameters is freed when they are sharded again, and comes back."""
    block = sharded(network(), subject, device).blocks[0]
    block.unshard()  # type: ignore[operator]
    storage = block.get_parameter("up.weight").untyped_storage()
    size = storage.nbytes()
    with gives_back(size, subject, device):
        block.reshard()  # type: ignore[operator]
        if storage.nbytes():
            raise RuntimeError(f"a whole parameter still has {storage.nbytes()} of {size} bytes")
    block.unshard()  # type: ignore[operator]
    again = block.get_parameter("up.weight")
    assert again.untyped_storage().nbytes() == size
    expected = network().blocks[0].get_parameter("up.weight")
    torch.testing.assert_close(again.detach().cpu(), expected.detach())


def test_frozen_parameters(subject: Subject, device: torch.device, rank: int) -> None:
    """Frozen parameters are sharded too, get no gradient and stay as they were."""
    model = sharded(network(frozen=True), subject, device)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_trained_alike(train(model, batch(rank), device), reference(frozen=True))
    assert all(p.grad is None for p in model.blocks[0].parameters())


def test_tied_weights(subject: Subject, device: torch.device, rank: int) -> None:
    """A head that has the embedding's weight still has it when it is sharded and trained."""
    model = sharded(network(tied=True), subject, device)
    assert model.head.weight is model.embedding.weight
    assert_trained_alike(train(model, batch(rank), device), reference(tied=True))
    assert model.head.weight is model.embedding.weight


def test_gradients_wait_for_the_last_micro_batch(
    subject: Subject, device: torch.device, rank: int
) -> None:
    """Without gradient sync nothing is exchanged; the last backward exchanges the sum."""
    model = sharded(network(), subject, device)
    for last in (False, False, True):
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        loss(model, batch(rank), device).backward()
    assert_close(gradients(model), {n: 3 * g for n, g in whole_gradients().items()})


def test_recomputed_blocks(subject: Subject, device: torch.device, rank: int) -> None:
    """Blocks whose activations are computed again in the backward pass give the same gradients."""
    model = network()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    sharded(model, subject, device)
    loss(model, batch(rank), device).backward()
    assert_close(gradients(model), whole_gradients())


@pytest.mark.requires("cpu_offload")
def test_parameters_on_the_cpu(subject: Subject, device: torch.device, rank: int) -> None:
    """With ``CPUOffloadPolicy`` parameters and gradients are on the CPU; results are the same."""
    policy = CPUOffloadPolicy(pin_memory=subject.capabilities.pinned_memory)
    model = sharded(network(), subject, device, offload_policy=policy)
    trained = train(model, batch(rank), device)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"cpu"}
    assert_trained_alike(trained, reference())


def test_the_norm_is_that_of_the_whole(subject: Subject, device: torch.device, rank: int) -> None:
    """All ranks clip by the same norm, that of all gradients together."""
    model = sharded(network(), subject, device)
    loss(model, batch(rank), device).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    norms: list[Tensor | None] = [None] * RANKS
    dist.all_gather_object(norms, tensors.gather(norm).cpu())
    expected = torch.cat([g.flatten() for g in whole_gradients().values()])
    whole = torch.linalg.vector_norm(expected)
    assert_close(dict(enumerate(norms)), dict.fromkeys(range(RANKS), whole))  # type: ignore[arg-type]
    clipped = {n: g * MAX_NORM / whole for n, g in whole_gradients().items()}
    assert_close(gradients(model), clipped)


def test_the_whole_state_dict(subject: Subject, device: torch.device, rank: int) -> None:
    """The first rank gets the whole model on the CPU, the others nothing."""
    model = sharded(network(tied=True), subject, device)
    full = state.full_state_dict(model, trainable=False)
    expected = parameters(network(tied=True)) if rank == 0 else {}
    assert {t.device.type for t in full.values()} <= {"cpu"}
    assert_close(full, expected)
