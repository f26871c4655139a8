"""The GPU that is not there must refuse what a real one refuses."""

import pytest
import torch
from fake_gpu import GPU, HOST, fake_gpu
from torch import nn


@pytest.fixture
def fake(monkeypatch):
    with fake_gpu(monkeypatch) as gpu:
        yield gpu


def test_results_are_where_their_inputs_are(fake):
    there, here = torch.zeros(3, device=GPU), torch.ones(3)
    assert (there.device, here.device) == (GPU, HOST)
    for result in (there + 1, there[1:], there.view(3, 1), torch.zeros_like(there), there.new_empty(2), there.double()):
        assert result.device == GPU
    for result in (here + 1, torch.zeros_like(there, device="cpu"), there.cpu(), there.to(here), there.to("cpu")):
        assert result.device == HOST
    assert here.to(GPU) is not here
    assert there.to(GPU) is there


@pytest.mark.parametrize(
    "mix",
    [
        lambda there, here: there + here,
        lambda there, here: here.gather(0, there.long()),
        lambda there, here: here[there.long()],
        lambda there, here: torch.cat([there, here]),
        lambda there, here: torch.stack([there[0], here[0]]),
        lambda there, here: there.masked_scatter(here.bool(), here),
        lambda there, here: nn.functional.embedding(there.long(), here[:, None]),
        lambda there, here: torch.where(there > 0, there, here),
        lambda there, here: there.numpy(),
    ],
)
def test_two_devices_do_not_mix(fake, mix):
    with pytest.raises((RuntimeError, TypeError), match="device"):
        mix(torch.zeros(3, device=GPU), torch.ones(3))


def test_what_torch_lets_mix(fake):
    there, here = torch.arange(3.0, device=GPU), torch.ones(3)
    there.copy_(here)
    here.copy_(there)
    assert (there * torch.tensor(2.0)).device == GPU
    assert there[torch.tensor([0, 2])].device == GPU
    there[torch.tensor([1])] = torch.tensor(5.0)
    assert there.tolist() == [1.0, 5.0, 1.0]


def test_a_model_that_moves_is_trained_there(fake):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    size = 4 * (4 * 2 + 2)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(GPU)
    assert fake.num_bytes() == size
    with pytest.raises(RuntimeError, match="same device"):
        model(torch.ones(1, 4))
    model(torch.ones(1, 4, device=GPU)).sum().backward()
    assert model.weight.grad.device == GPU
    optimizer.step()
    assert {tensor.device for tensor in optimizer.state[model.weight].values()} == {GPU}
    optimizer.zero_grad()
    optimizer.state.clear()
    for parameter in model.parameters():
        parameter.data = parameter.data.cpu()
    assert fake.num_bytes() == 0


def test_a_fused_optimizer_wants_its_step_count_there(fake):
    weight = nn.Parameter(torch.ones(2, device=GPU))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.state[weight]["step"] = optimizer.state[weight]["step"].cpu()
    with pytest.raises(RuntimeError, match="same device"):
        optimizer.step()
