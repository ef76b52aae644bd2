"""Samplers as Ray actors, for workers on other machines. The only file that knows Ray."""

from __future__ import annotations

import pickle
from typing import Any

from posttrain.core.errors import ConfigError
from posttrain.rollout.asynchronous.remote import Make, ProcessLost, RemoteReceiver, Station


def ray_receiver(make: Make) -> RemoteReceiver:
    """A sampler in an actor of its own. Joins the cluster that RAY_ADDRESS names, or starts one on this machine.

    Raises ConfigError when Ray is not installed.
    """
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError:
        raise ConfigError("asynchronous.engine=ray needs Ray; install posttrain[ray], or use engine=threads or processes") from None
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    actor: Any = ray.remote(num_cpus=1)(Station).remote(pickle.dumps(make))

    def call(name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return ray.get(actor.do.remote(name, arguments))
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except ray.exceptions.RayActorError as error:
            raise ProcessLost(f"a sampler's Ray actor is gone: {str(error).splitlines()[0]}; see `ray logs`, then resume the run") from None

    return RemoteReceiver(call, lambda: ray.kill(actor))
