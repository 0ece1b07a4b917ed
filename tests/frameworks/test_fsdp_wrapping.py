"""What FSDP1 allocates while it wraps a model, beside torch's own code and counted by hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.frameworks.fsdp.flat_states import BUCKET, FASTEST, QUEUE, SLOWEST, Unit, buckets, launches, wrapping
from memplan.frameworks.fsdp.hooks import GATHERING
from memplan.tape.events import Drop, Hold

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is rank 0 of two, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 128, bias=False)
        self.down = torch.nn.Linear(128, 64, bias=False)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 64)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of every tensor that is put together or copied, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.clone):
            self.sizes.append(result.untyped_storage().nbytes())
        return result


@pytest.mark.usefixtures("two_ranks")
def test_flat_tensors_and_pieces_are_made_in_the_order_of_torch() -> None:
    """Layers come before the root, the flat tensor before its piece."""
    model, made = Model(), Made()
    with warnings.catch_warnings(), made:
        warnings.simplefilter("ignore")
        FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=True, device_id=CPU)
    layer, root = (64 * 128 * 4, 128 * 64 * 4), (256 * 64 * 4,)
    tape = wrapping([Unit(layer), Unit(layer), Unit(root)], 2, 1)
    flat = [event.bytes for event in tape if isinstance(event, Hold) and event.name in ("flat_parameter", "piece")]
    gathered = [event for event in tape if isinstance(event, Hold) and event.stream == GATHERING]
    assert flat[: -len(gathered)] == made.sizes == [65_536, 32_768, 65_536, 32_768, 65_536, 32_768]


@pytest.mark.parametrize(
    "sizes",
    [
        (112, 112, 112, 32, 8, 8, 32),  # a layer of Mistral 7B in bf16
        (250, 250),
        (249, 1, 1),
        (300, 10, 10, 10),
        (10,),
    ],
)
def test_buckets_are_those_of_torch(sizes: tuple[int, ...]) -> None:
    """``broadcast_coalesced`` cuts by ``compute_bucket_assignment_by_size``. Nothing touches the memory asked for."""
    tensors = [torch.empty(size * MIB, dtype=torch.uint8) for size in sizes]
    found, _ = dist._compute_bucket_assignment_by_size(tensors, [BUCKET])  # type: ignore[attr-defined]
    assert list(buckets([size * MIB for size in sizes])) == [[sizes[at] * MIB for at in bucket] for bucket in found]


def test_a_layer_of_mistral_by_hand() -> None:
    """416 MiB of parameters, a bucket of all but the last (112), the flat tensor, and a quarter of it; then the pieces
    of two layers and of a root of 500 MiB, and flat tensors of the root and, gathered one after the other, two layers.
    """
    layer, root = tuple(size * MIB for size in (32, 8, 8, 32, 112, 112, 112)), (250 * MIB, 250 * MIB)
    tape = wrapping([Unit(layer), Unit(layer), Unit(root)], 4, 1)
    first = tape[: next(at for at, event in enumerate(tape) if isinstance(event, Hold) and event.name == "piece") + 1]
    held = [(event.name, event.bytes // MIB) for event in first if isinstance(event, Hold)]
    assert [one for one in held if one[0] != "parameter"] == [("bucket", 304), ("flat_parameter", 416), ("piece", 104)]
    assert _peak(tape) == (2 * 104 + 500 + 500 + 125) * MIB  # the root's two parameters are buckets themselves
    gathered = [event.bytes // MIB for event in tape if isinstance(event, Hold) and event.stream == GATHERING]
    assert gathered == [500, 416, 416]
    assert _left(tape) == 0


def test_pieces_that_are_cast_stay_beside_their_copies_one_by_one() -> None:
    """16 bits become 32: a piece of 8 MiB ends behind its copy of 16."""
    tape = wrapping([Unit((16 * MIB,), 16 * MIB), Unit((16 * MIB,), 16 * MIB)], 2, 1)
    casts = [at for at, event in enumerate(tape) if isinstance(event, Hold) and event.name == "piece_in_fp32"]
    assert [tape[at + 1] for at in casts] == [Drop(event.tensor, 8 * MIB, event.category) for event in _pieces(tape)]
    assert _left(tape) == 0


def _pieces(tape: tuple[Any, ...]) -> list[Hold]:
    return [event for event in tape if isinstance(event, Hold) and event.name == "piece"]


def _running(tape: tuple[Any, ...]) -> Iterator[int]:
    live = 0
    for event in tape:
        live += event.bytes if isinstance(event, Hold) else -event.bytes
        yield live


def _peak(tape: tuple[Any, ...]) -> int:
    """Of what the default stream holds."""
    own = {event.tensor for event in tape if isinstance(event, Hold) and not event.stream}
    return max(_running(tuple(event for event in tape if event.tensor in own)))


def _left(tape: tuple[Any, ...]) -> int:
    return list(_running(tape))[-1]


# -- ranks that run ahead ---------------------------------------------------------------------------


def _buckets_at_once(tape: tuple[Any, ...]) -> int:
    """Most bytes of buckets that are held at the same time."""
    own = {event.tensor for event in tape if isinstance(event, Hold) and event.name == "bucket"}
    return max(_running(tuple(event for event in tape if event.tensor in own)))


def test_a_rank_on_the_meta_device_keeps_every_bucket_until_rank_0_has_sent_it() -> None:
    """32 layers of Mistral 7B in 4 bits, of 104 MiB: nine tensors each, one bucket. A bucket is put together in one
    launch and taken apart in nine, the flat tensor and its piece take two: 12 a layer are less than fill a stream."""
    layer = Unit((*(size * MIB for size in (8, 2, 2, 8, 28, 28, 28)), 8192, 8192))
    units = [*[layer] * 32, Unit((250 * MIB, 250 * MIB))]
    assert launches(layer) == 1 + 9 + 2
    assert _buckets_at_once(wrapping(units, 2, 1)) == sum(layer.parts)
    assert _buckets_at_once(wrapping(units, 2, 1, SLOWEST)) == 32 * sum(layer.parts)
    assert _left(wrapping(units, 2, 1, SLOWEST)) == 0


def test_what_rank_0_copies_in_less_time_is_not_waited_for() -> None:
    """A layer of 104 MiB takes 3.46 ms over PCIe 4, wrapping two parameters 1.4: when the last of 32 is wrapped, rank 0
    has sent 9 (9 x 4.86 < 32 x 1.4 = 44.8 ms), and 23 wait."""
    layer = Unit((52 * MIB, 52 * MIB))
    tape = wrapping([*[layer] * 32, Unit((MIB,))], 2, 1, FASTEST)
    assert _buckets_at_once(tape) == 23 * 104 * MIB


def test_full_streams_hold_a_rank_back() -> None:
    """64 tensors of 2 MiB are a bucket: 67 launches, of which 15 layers' are 1,005; the sixteenth waits for the first
    one's end."""
    layer = Unit((2 * MIB,) * 64)
    assert QUEUE // launches(layer) == 15
    assert _buckets_at_once(wrapping([*[layer] * 40, Unit((MIB,))], 2, 1, SLOWEST)) == 16 * 128 * MIB


def test_adapters_are_wrapped_one_by_one() -> None:
    """Each is a bucket by itself, which is the parameter: nothing is put together but the flat tensor."""
    assert launches(Unit((MIB,) * 8, wraps=8)) == 16


def _emptied(module: torch.nn.Module) -> None:
    """Accelerate's ``param_init_fn``."""
    module.to_empty(device=CPU, recurse=False)


@pytest.mark.usefixtures("two_ranks")
def test_a_model_on_the_meta_device_is_flattened_as_one_on_the_cpu() -> None:
    """Two launches of ``launches`` for each unit, whoever makes the parameters."""
    with torch.device("meta"):
        model = Model()
    made = Made()
    with warnings.catch_warnings(), made:
        warnings.simplefilter("ignore")
        FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            use_orig_params=True,
            device_id=CPU,
            param_init_fn=_emptied,
        )
    assert made.sizes == [65_536, 32_768, 65_536, 32_768, 65_536, 32_768]
