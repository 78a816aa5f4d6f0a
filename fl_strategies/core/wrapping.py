"""Strategies of Flower's that wrap another one, which must not be one of ours."""

import inspect

from flwr.serverapp.strategy import Strategy

from fl_strategies.exceptions import InvalidParameter


def refuse_wrapper(strategy: Strategy) -> None:
    """Raise `InvalidParameter` if the caller of our caller is another strategy.

    Flower's wrappers clip and blur arrays as if they were updates of weights. Around a
    strategy whose messages are votes, scores or whole models they would run and protect
    nothing, and no hook of a strategy says that it is being wrapped.
    """
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    outer = caller.f_locals.get("self") if caller is not None else None
    if isinstance(outer, Strategy) and outer is not strategy:
        owner = type(strategy).__name__
        raise InvalidParameter(
            f"{owner}: it must be run by its own start, got run by {type(outer).__name__}. "
            f"Around {owner} a wrapper protects nothing: use the strategy's own privacy "
            f"options, or wrap Flower's own class and give that to FlowerStrategy."
        )
