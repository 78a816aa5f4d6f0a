"""Data, model, training."""

import torch
import torch.nn.functional as F
from clients import TorchLearner
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small network for images of 8 by 8."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)
        self.fc1 = nn.Linear(16 * 3 * 3, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        """Return a score a class."""
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


def load_split(split: str):
    """Return a data set: "train" is dealt to the nodes, "test" is the server's."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).reshape(-1, 1, 8, 8).astype("float32")
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=450, random_state=1)
    rows, labels = (x_train, y_train) if split == "train" else (x_test, y_test)
    return TensorDataset(torch.from_numpy(rows), torch.from_numpy(labels))


def load_data(partition_id: int, num_partitions: int, batch_size: int = 32):
    """Return the loaders of one node, to train and to validate."""
    x, y = load_split("train")[partition_id::num_partitions]
    x_train, x_val, y_train, y_val = train_test_split(x, y, test_size=0.2, random_state=42)
    trainloader = DataLoader(TensorDataset(x_train, y_train), batch_size, shuffle=True)
    return trainloader, DataLoader(TensorDataset(x_val, y_val), batch_size)


def get_model():
    """Return the network as a learner; at each node it could be another one."""
    return TorchLearner(Net, num_classes=10, epochs=10, learning_rate=0.01)


def test(net, testloader):
    """Return loss and accuracy."""
    net.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in testloader:
            scores = net(images)
            loss += F.cross_entropy(scores, labels, reduction="sum").item()
            correct += (scores.argmax(dim=1) == labels).sum().item()
    size = len(testloader.dataset)
    return loss / size, correct / size
