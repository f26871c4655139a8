"""The engine's process: `python -m lightning_ppo.rollout.local.worker SOCKET_FD FILES_FD`.

It must not import Lightning. It ends when its socket does (the trainer is gone), and leaves Ctrl-C to the trainer.
"""

import os
import queue
import signal
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection

import torch

from lightning_ppo.errors import EngineError
from lightning_ppo.refit.shared_memory import SharedWeights
from lightning_ppo.rollout.local.protocol import (
    Abort,
    Command,
    Done,
    Ready,
    Refused,
    Reply,
    SetSleep,
    SetWeights,
    Start,
    Submit,
    Unserved,
)

_PARENT_CHECK_S = 0.5


class Worker:
    """Carries out the trainer's commands between decode steps."""

    def __init__(self, replies: "Connection[Reply, list[Command]]", files: socket.socket, start: Start) -> None:
        # Here, not at the top: while these load, the receiving thread already watches the trainer.
        from lightning_ppo.rollout.local.decoder import NativeDecoder
        from lightning_ppo.rollout.local.fallback import BatchScheduler
        from lightning_ppo.rollout.local.rows import RowTable
        from lightning_ppo.rollout.local.scheduler import SlotScheduler
        from lightning_ppo.rollout.local.skeleton import Skeleton

        config, context = start.config, start.spec.max_context_tokens
        torch.set_num_threads(config.num_threads)
        self._replies, self._files = replies, files
        self._skeleton = Skeleton.of(start.spec.config_json)
        device, dtype = _usable(config.device), getattr(torch, config.dtype)
        problem = self._skeleton.native_problem(context)
        if config.backend == "native" and problem is not None:
            raise EngineError(
                f"backend=native cannot serve model_type={self._skeleton.config.model_type}, which {problem};"
                " set backend=auto"
            )
        native = config.backend != "transformers" and problem is None
        vocab_size = self._skeleton.vocab_size

        def build() -> SlotScheduler | BatchScheduler:
            rows = RowTable(config.slots, context, vocab_size)
            if not native:
                return BatchScheduler(self._skeleton, rows, device, dtype)
            decoder = NativeDecoder(self._skeleton, config.slots, context, device, dtype, config.num_threads)
            return SlotScheduler(decoder, rows)

        self._build = build
        self._scheduler: SlotScheduler | BatchScheduler | None = build()
        self._weights: SharedWeights | None = None
        self._version = -1
        backend = "native" if native else "transformers"
        reason = "" if native or problem is None else f": model_type={self._skeleton.config.model_type} {problem}"
        print(f"backend {backend}{reason}", flush=True)
        replies.send(Ready(backend, vocab_size))

    def serve(self, inbox: "queue.SimpleQueue[list[Command]]") -> None:
        """Run for ever: take every command that has arrived, then make one decode step."""
        while True:
            commands = [] if self._scheduler is not None and self._scheduler.is_busy else inbox.get()
            while not inbox.empty():
                commands = commands + inbox.get()
            for command in commands:
                self._carry_out(command)
            self._step()

    def _step(self) -> None:
        # nothing that outlives this call may refer to the scheduler: sleep would not give its memory back
        if self._scheduler is not None and self._scheduler.is_busy:
            finished = self._scheduler.step(self._version)
            if finished is not None:
                self._replies.send(finished)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Submit):
            if self._scheduler is None:
                self._replies.send(Unserved(command.key, "engine=local is asleep; call wake first"))
            else:
                self._scheduler.submit(command)
        elif isinstance(command, Abort):
            if self._scheduler is not None:
                self._scheduler.abort(command.key)
        elif isinstance(command, SetSleep):
            self._set_sleep(command.asleep)
        elif isinstance(command, SetWeights):
            try:
                self._set_weights(command)
            except EngineError as error:
                self._replies.send(Refused(str(error)))

    def _set_weights(self, command: SetWeights) -> None:
        if command.layout is not None:
            _, received, _, _ = socket.recv_fds(self._files, 1, 1)
            if self._weights is not None:
                self._weights.close()
            self._weights = SharedWeights.attach(command.layout, received[0])
        if command.changed and self._weights is not None:
            tensors = self._skeleton.canonical(self._weights.views)
            # asleep they stay in shared memory, where waking up finds them
            if self._scheduler is not None:
                self._scheduler.load(tensors)
        self._version = command.version
        self._replies.send(Done(command.version))

    def _set_sleep(self, asleep: bool) -> None:
        if asleep and self._scheduler is not None:
            if self._scheduler.is_busy:
                why = "would lose the responses in flight"
                self._replies.send(Refused(f"engine=local {why}; wait for them, or cancel them, before sleep"))
                return
            self._scheduler = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        elif not asleep and self._scheduler is None:
            self._scheduler = self._build()
            if self._weights is not None:
                self._scheduler.load(self._skeleton.canonical(self._weights.views))
        self._replies.send(Done(self._version))


def _usable(name: str) -> torch.device:
    device = torch.device(name)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        # a torch without CUDA asserts, one that finds no device raises an error of several lines
        why = str(error).splitlines()[0].rstrip(".")
        raise EngineError(f"device={name} cannot be used here ({why}); set local.device=cpu") from error
    return device


def _receive(connection: "Connection[Reply, list[Command]]", inbox: "queue.SimpleQueue[list[Command]]") -> None:
    # A thread of its own, so that the process leaves at once whatever the main thread is doing. The parent's number is
    # looked at too: a forked child of the trainer may keep the socket open.
    parent = os.getppid()
    try:
        while True:
            if connection.poll(_PARENT_CHECK_S):
                inbox.put(connection.recv())
            elif os.getppid() != parent:
                break
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def main() -> None:
    """Serve until the trainer goes away; an error goes to the log (stderr) and ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Reply, list[Command]] = Connection(int(sys.argv[1]))
    files = socket.socket(fileno=int(sys.argv[2]))
    inbox: queue.SimpleQueue[list[Command]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    try:
        (start,) = inbox.get()
        if not isinstance(start, Start):
            raise TypeError(f"first message {start!r} is not Start")
        try:
            worker = Worker(connection, files, start)
        except EngineError as error:
            connection.send(Refused(str(error)))
            raise
        worker.serve(inbox)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
