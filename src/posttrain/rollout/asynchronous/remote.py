"""Samplers in other processes: a Receiver here that stands for one there.

The one there is made from pickled bytes, so it shares no memory with the model in training; weights travel as one safetensors message.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import PosttrainError
from posttrain.engine.runtime import prepare_environment
from posttrain.engine.types import Completion, Receiver, Request

if TYPE_CHECKING:
    from torch import Tensor

Make = Callable[[], Receiver]
GOODBYE = 5.0
"""Seconds that a process gets to end by itself."""


class Station:
    """The far side: owns the sampler and does what it is told by name. Example: Station(pickle.dumps(make)).do("logps", ([1], [2]))"""

    def __init__(self, make: bytes):
        self._receiver: Receiver = pickle.loads(make)()

    def do(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the sampler; weights come as safetensors bytes."""
        if name == "receive":
            from safetensors.torch import load

            arguments = (load(arguments[0]), *arguments[1:])
        return getattr(self._receiver, name)(*arguments)


class RemoteReceiver:
    """The near side; a Receiver.

    Args:
        call: does a method of the sampler there, by name, and returns its result or raises its error.
        stop: ends what is there.
        pid: of the process there, where it is on this machine.
    """

    def __init__(self, call: Callable[[str, tuple[Any, ...]], Any], stop: Callable[[], None], pid: int | None = None):
        self._call, self.close, self.pid = call, stop, pid
        self.version = 0

    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        """See Sampler; progress is told once, at the end."""
        completions = self._call("generate", (list(requests),))
        if progress:
            progress(len(completions))
        return completions

    def receive(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See Receiver."""
        from safetensors.torch import save

        self._call("receive", (save({name: tensor.contiguous() for name, tensor in weights.items()}), version))
        self.version = version

    def digests(self) -> Mapping[str, str]:
        """See Receiver."""
        return dict(self._call("digests", ()))

    def logps(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """See Receiver."""
        return self._call("logps", (list(prompt), list(ids)))


class ProcessLost(PosttrainError):
    """A sampler's process is gone."""

    exit_code = 3


def process_receiver(make: Make) -> RemoteReceiver:
    """A sampler in a process of its own on this machine."""
    prepare_environment()
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_serve, args=(far, pickle.dumps(make)), daemon=True)
    process.start()
    far.close()

    def call(name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            near.send((name, arguments))
            answer, result = near.recv()
        except (EOFError, OSError):
            process.join(GOODBYE)
            raise ProcessLost(f"a sampler's process ended with code {process.exitcode} (killed, out of memory?); resume the run") from None
        if answer == "error":
            raise result
        return result

    def stop() -> None:
        near.close()  # the other side reads the end of the stream
        process.join(GOODBYE)
        if process.is_alive():
            process.terminate()

    return RemoteReceiver(call, stop, process.pid)


def _serve(far: Connection, make: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the trainer decides when to stop
    import torch

    torch.set_num_threads(1)
    station = Station(make)
    while True:
        try:
            name, arguments = far.recv()
        except EOFError:
            return
        try:
            answer = ("done", station.do(name, arguments))
        except Exception as error:  # noqa: BLE001 - raised again on the near side, whatever it is
            answer = ("error", _portable(error))
        far.send(answer)


def _portable(error: Exception) -> Exception:
    """The error itself if it survives being pickled, else one that names it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an error that cannot travel is told in words
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
