"""A real HTTP server on this machine whose answers a test scripts, also those of a bad server."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from onlynorm.data import RemoteFile

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]
CONTENT = random.Random(0).randbytes(200_000)


@dataclass
class Server:
    """The answers to come, of which the last one is repeated, and the requests that came."""

    address: str
    answers: list[Answer] = field(default_factory=list)
    requests: list[dict[str, str]] = field(default_factory=list)

    @property
    def ranges(self) -> list[str]:
        """The Range header of every request, "" for none."""
        return [request.get("Range", "") for request in self.requests]

    def file(self, *answers: Answer, content: bytes = CONTENT, **others: Any) -> RemoteFile:
        """A file with this content on this server, which will give these answers."""
        self.answers[:] = answers
        settings: dict[str, Any] = {"n_bytes": len(content), "addresses": (f"{self.address}/file.bin",)}
        return RemoteFile(name="file.bin", sha256=hashlib.sha256(content).hexdigest(), **(settings | others))


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A server in a thread of this process."""
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                server.requests.append({"path": self.path, **dict(self.headers.items())})
                answer = server.answers[0] if len(server.answers) == 1 else server.answers.pop(0)
            with contextlib.suppress(OSError):  # the other side closed the connection
                answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        server = Server(f"http://127.0.0.1:{listening.server_address[1]}")
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()


def reply(
    status: int, body: bytes = b"", *, length: int | str | None = -1, after: float = 0.0, **headers: str
) -> Answer:
    """A fixed answer. `length` is the declared one: by default the true one, None for no declaration."""

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        time.sleep(after)
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        if length is not None:
            request.send_header("Content-Length", str(len(body) if length == -1 else length))
        request.end_headers()
        request.wfile.write(body)

    return answer


def whole(content: bytes = CONTENT, **headers: str) -> Answer:
    """Everything, whatever range is asked for."""
    return reply(200, content, **headers)


def ranged(content: bytes = CONTENT, *, n_sent: int | None = None, tag: str = "", then: Answer | None = None) -> Answer:
    """The range that is asked for, of which only `n_sent` bytes arrive; `then` is called before it breaks off."""

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        start = int(asked[1]) if asked and request.headers.get("If-Range", tag) == tag else 0
        if asked and start >= len(content):
            reply(416, Content_Range=f"bytes */{len(content)}")(request)
            return
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(content) - start))
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if tag:
            request.send_header("ETag", tag)
        request.end_headers()
        request.wfile.write(content[start : len(content) if n_sent is None else start + n_sent])
        if then is not None:
            then(request)

    return answer


def partial(header: str | None, body: bytes, **more: Any) -> Answer:
    """A partial answer with this Content-Range."""
    return reply(206, body, **({} if header is None else {"Content_Range": header}), **more)
