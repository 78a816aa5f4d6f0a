"""The devices that PyTorch modules can be trained on, by name."""

from typing import Final, Literal, TypeAlias, get_args

from clients.torch_training import OWNER
from fl_strategies.exceptions import MissingExtra, require

try:
    import torch
except ImportError as error:
    raise MissingExtra("TorchLearner", "torch", "torch") from error

DeviceName: TypeAlias = Literal["auto", "cpu", "cuda", "mps"]

CPU: Final = torch.device("cpu")


def find_device(name: str) -> torch.device:
    """Return a device by its name, "auto" for the fastest; raise unless it is available."""
    names = get_args(DeviceName)
    require(name in names, OWNER, "device", f"one of {', '.join(names)}", name)
    if name == "cpu":  # without a look at others: CUDA that was asked for anything cannot fork
        return CPU
    available = [kind for kind in ("cuda", "mps") if _is_available(kind)] + ["cpu"]
    rule = f"available on this machine ({', '.join(available)})"
    require(name in ("auto", *available), OWNER, "device", rule, name)
    return torch.device(available[0] if name == "auto" else name)


def _is_available(kind: str) -> bool:
    if kind == "cuda":
        return torch.cuda.is_available()
    return torch.backends.mps.is_available()
