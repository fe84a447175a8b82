"""A small network that reads digits, trained in a few seconds: something to attack."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRAINED_ON = 1200


@pytest.fixture(scope="session")
def digits() -> tuple[nn.Module, Tensor, Tensor]:
    """The network, in evaluation mode, and 200 images it has not seen, (200,1,8,8) in [0,1], with their labels."""
    datasets = pytest.importorskip("sklearn.datasets")
    loaded = datasets.load_digits()
    images, labels = torch.tensor(loaded.images).float().unsqueeze(1) / 16, torch.tensor(loaded.target)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 10),
        )
        optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
        for _ in range(4):
            for batch in torch.randperm(TRAINED_ON).split(64):
                loss = F.cross_entropy(network(images[batch]), labels[batch])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
    network.requires_grad_(False)
    return network.eval(), images[-200:], labels[-200:]
