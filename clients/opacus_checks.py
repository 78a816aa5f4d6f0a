"""What a module must be so that DP-SGD with Opacus keeps its promise."""

import copy
import warnings
from typing import Final

from clients.torch_training import logits_of
from fl_strategies.exceptions import InvalidParameter, MissingExtra

try:
    import torch
    from opacus.grad_sample import GradSampleModule
    from opacus.validators import ModuleValidator
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtra("DPTorchLearner", "opacus", "opacus") from error

OWNER: Final = "DPTorchLearner"


def record_gradients(loss: Tensor) -> None:
    """Let Opacus find the gradient of every record, `grad_sample` of each parameter."""
    with warnings.catch_warnings():
        # Opacus' hooks do not use the gradient of the rows, which PyTorch would miss.
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        torch.autograd.backward(loss)


def check_module(module: nn.Module, row_shape: tuple[int, ...]) -> None:
    """Raise `InvalidParameter` for what makes a module leak though Opacus accepts it.

    Opacus knows layers by their type; a layer without weights, or a module that moves rows
    around by itself, is only found out by trying. No private row is used for that.
    """
    trial, rows = copy.deepcopy(module).cpu(), torch.ones(2, *row_shape)
    for parameter in trial.parameters():  # layers that start at 0 would hide the others
        parameter.data += 0.1 * torch.randn_like(parameter)
    dropout = torch.default_generator.get_state()
    try:
        with torch.no_grad():
            among_equals = logits_of(trial(rows))[0]
            torch.default_generator.set_state(dropout)
            rows[1] = 0.0
            among_others = logits_of(trial(rows))[0]
        model = GradSampleModule(trial, loss_reduction="sum")
        record_gradients(logits_of(model(rows)).sum())
    except Exception as error:
        said = f"Opacus says: {str(error).partition(chr(10))[0][:200]}"
        raise _unsupported("that Opacus can make private", "an error", said) from error
    if not torch.allclose(among_equals, among_others, equal_nan=True):
        raise _unsupported("that treat every row by itself", "rows that influence each other")
    for (name, before), after in zip(module.named_buffers(), trial.buffers(), strict=True):
        if not torch.equal(before.cpu(), after):
            raise _unsupported("that record nothing in buffers", f"a change of {name!r}")
    _check_gradients(trial, len(rows))


def check_layers(module: nn.Module) -> None:
    """Raise `InvalidParameter` naming a layer that Opacus cannot make private."""
    # Children come after their parents, so that from the end the culprit itself is found.
    for name, layer in reversed(list(module.named_modules())):
        got = f"{type(layer).__name__} at {name!r}"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training:
            raise _unsupported("without batch normalisation", got, "Use GroupNorm instead.")
        for fault in ModuleValidator.validate(layer) if layer.training else ():
            raise _unsupported("that Opacus can make private", got, f"Opacus says: {fault}")


def _check_gradients(module: nn.Module, num_rows: int) -> None:
    """Check that every parameter has one gradient a row: that is what gets clipped."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        gradients = getattr(parameter, "grad_sample", None)
        if gradients is None:
            hint = "Freeze it, or use it by calling the layer it belongs to."
            raise _unsupported("whose parameters all learn", f"no gradient of {name!r}", hint)
        if len(gradients) != num_rows:
            got = f"{len(gradients)} gradients of {name!r} for {num_rows} rows"
            raise _unsupported("that keep rows apart in every layer", got)


def _unsupported(rule: str, got: str, hint: str = "") -> InvalidParameter:
    sentence = f"{OWNER}: module_fn must be a factory of modules {rule}, got {got}."
    return InvalidParameter(f"{sentence} {hint}".strip())
