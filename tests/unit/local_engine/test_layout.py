import os
import tempfile

import pytest
import torch

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.layout import FlatLayout, TensorSlot, write_weights
from lightning_ppo.refit.shared_memory import SharedWeights

_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def _weights() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    pairs = [(f"w{i}", (torch.randn(3, 5 + i) * 3).to(dtype)) for i, dtype in enumerate(_DTYPES)]
    pairs.append(("transposed", torch.randn(4, 7).t()))
    pairs.append(("expanded", torch.randn(1, 6).expand(3, 6)))
    pairs.append(("strided", torch.randn(20)[::3]))
    pairs.append(("scalar", torch.tensor(2.5)))
    pairs.append(("empty", torch.empty(0, 4)))
    pairs.append(("needs_grad", torch.nn.Parameter(torch.randn(2, 2))))
    return pairs


def test_both_sides_see_the_same_tensors_whatever_their_strides_and_dtypes() -> None:
    mine = SharedWeights.create(_weights())
    theirs = SharedWeights.attach(mine.layout, os.dup(mine.fd))
    for name, tensor in _weights():
        assert theirs.views[name].dtype == tensor.dtype
        assert torch.equal(theirs.views[name], tensor), name
    mine.write([(name, tensor.detach() + 1 if tensor.dtype != torch.bool else ~tensor) for name, tensor in _weights()])
    assert torch.equal(theirs.views["w0"], _weights()[0][1] + 1)
    theirs.close()
    mine.close()
    mine.close()


def test_the_file_has_no_name_in_any_folder_and_its_room_is_reserved() -> None:
    weights = SharedWeights.create(_weights())
    status = os.fstat(weights.fd)
    assert status.st_nlink == 0
    assert status.st_blocks * 512 >= weights.layout.num_bytes
    weights.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs[1:], "weights=w0 is missing"),
        (lambda pairs: [*pairs, ("new", torch.ones(1))], "weights=new was not among the first weights"),
        (lambda pairs: [*pairs, pairs[0]], "weights=w0 comes twice"),
        (
            lambda pairs: [("w0", torch.ones(2, 2)), *pairs[1:]],
            r"weights=w0 is float32\[2, 2\] but was float32\[3, 5\]",
        ),
        (lambda pairs: [("w0", pairs[0][1].double()), *pairs[1:]], "weights=w0 is float64"),
    ],
)
def test_later_weights_must_be_the_same_tensors(change, message) -> None:
    buffer = SharedWeights.create(_weights())
    with pytest.raises(EngineError, match=message):
        buffer.write(change(_weights()))
    buffer.close()


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(EngineError, match="comes twice"):
        SharedWeights.create([("a", torch.ones(1)), ("a", torch.ones(1))])


@pytest.mark.parametrize(
    "slots",
    [
        (TensorSlot("a", "float32", (100,), 0),),
        (TensorSlot("a", "float32", (4,), -64),),
        (TensorSlot("a", "float32", (4,), 3),),
        (TensorSlot("a", "float32", (-4,), 0),),
        (TensorSlot("a", "float32", (32,), 0), TensorSlot("b", "float32", (4,), 64)),
        (TensorSlot("a", "nonsense", (4,), 0),),
    ],
)
def test_garbage_layouts_are_refused(slots) -> None:
    with pytest.raises(EngineError):
        FlatLayout(slots, 256)


def test_a_buffer_shorter_than_its_layout_is_refused() -> None:
    layout = FlatLayout.of(_weights())
    with tempfile.TemporaryFile() as file:
        file.truncate(layout.num_bytes - 1)
        with pytest.raises(EngineError, match="too short"):
            SharedWeights.attach(layout, os.dup(file.fileno()))
    with pytest.raises(EngineError, match="shorter than its layout"):
        layout.views(bytearray(10))


def test_write_weights_takes_any_order() -> None:
    layout = FlatLayout.of(_weights())
    views = layout.views(bytearray(layout.num_bytes))
    write_weights(views, reversed(_weights()))
    assert torch.equal(views["transposed"], dict(_weights())["transposed"])
