"""A party's line to its SuperLink, which can be cut: nothing passes, and nobody is told."""

import socket
import threading
from contextlib import suppress

_CHUNK = 65536
_POLL_SECONDS = 0.2
_MORE_THAN_WAIT = 8


class Link:
    """A relay of bytes on loopback; TLS passes through it as it is.

    What is sent over a line that is cut waits, as in a network that repeats what was not
    confirmed, and arrives once it is mended, if both ends are still there. New connections
    are not answered at all: the queue of those that wait is full, and the system drops them.

    Parameters
    ----------
    host, port : str, int
        Where the line leads.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._whole, self._open = threading.Event(), True
        self._whole.set()
        self._idle: list[socket.socket] = []
        self._listener = socket.create_server((host, 0), backlog=0)
        self._listener.settimeout(_POLL_SECONDS)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.address = "{}:{}".format(*self._listener.getsockname())

    def cut(self) -> None:
        """Let nothing pass any more, in open connections and in new ones."""
        self._whole.clear()
        place = self._listener.getsockname()
        for _ in range(_MORE_THAN_WAIT):
            idle = socket.socket()
            idle.setblocking(False)
            idle.connect_ex(place)
            self._idle.append(idle)

    def mend(self) -> None:
        """Let everything pass again."""
        for idle in self._idle:
            idle.close()
        self._idle.clear()
        self._whole.set()

    def close(self) -> None:
        """End all connections."""
        self._open = False
        self.mend()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while self._open:
            if not self._whole.wait(_POLL_SECONDS):
                continue
            with suppress(TimeoutError):
                near, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(near,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(self._target) as far:
            back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
            back.start()
            self._pump(near, far)
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        """Pass bytes on until one side has no more."""
        source.settimeout(_POLL_SECONDS)
        with suppress(OSError):
            while self._open:
                try:
                    data = source.recv(_CHUNK)
                except TimeoutError:
                    continue
                while self._open and not self._whole.wait(_POLL_SECONDS):
                    pass
                if not data:
                    break
                sink.sendall(data)
        for side in (source, sink):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
