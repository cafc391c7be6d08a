"""A server of files by HTTP on this machine, which fails as it is told to."""

import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request."""

    status: int = 200
    """Another status is the whole answer."""
    num_sent: int | None = None
    """The connection is closed after so many bytes of the body; None sends all."""
    stalls: bool = False
    """It is not closed then: nothing comes any more."""
    stated_length: int | None = None
    """Content-Length, where it is not the right one."""
    content_range: str | None = None
    """Content-Range, where it is not the right one."""
    garbles: bool = False
    """The content is another one, of the same length."""
    headers: dict[str, str] = field(default_factory=dict)


class FileServer:
    """Serves the files of a folder; a context manager.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.faults: dict[str, list[Fault]] = {}  # by path without the first slash; each request takes the first one left
        self.ignores_ranges = False
        self.requests: list[tuple[str, str | None, str | None]] = []  # path with query, Range, Authorization
        self.released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def counts(self) -> Counter[str]:
        """How often each path was asked for."""
        return Counter(urlsplit(path).path.lstrip("/") for path, _, _ in self.requests)

    def __enter__(self) -> "FileServer":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


def _handler_of(server: FileServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.requests.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
            name = unquote(urlsplit(self.path).path).lstrip("/")
            faults = server.faults.get(name, [])
            self.answer(server.root / name, faults.pop(0) if faults else Fault())

        def do_HEAD(self) -> None:
            file = server.root / unquote(urlsplit(self.path).path).lstrip("/")
            self.send_response(200 if file.is_file() else 404)
            self.send_header("Content-Length", str(file.stat().st_size if file.is_file() else 0))
            self.end_headers()

        def answer(self, file: Path, fault: Fault) -> None:
            if fault.status != 200 or not file.is_file():
                self.send_response(fault.status if fault.status != 200 else 404)
                for name, value in fault.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                return
            content = file.read_bytes()
            if fault.garbles:
                content = bytes(byte ^ 1 for byte in content)
            first, last = self.extent(len(content))
            if first >= len(content) > 0:
                self.send_response(416)
                self.end_headers()
                return
            body = content[first : last + 1]
            is_part = self.headers.get("Range") is not None and not server.ignores_ranges
            self.send_response(206 if is_part else 200)
            if is_part:
                self.send_header("Content-Range", fault.content_range or f"bytes {first}-{last}/{len(content)}")
            self.send_header("Content-Length", str(len(body) if fault.stated_length is None else fault.stated_length))
            self.end_headers()
            self.wfile.write(body[: fault.num_sent])
            self.wfile.flush()
            if fault.stalls:
                server.released.wait(60)

        def extent(self, length: int) -> tuple[int, int]:
            asked = self.headers.get("Range")
            if asked is None or server.ignores_ranges:
                return 0, length - 1
            first, _, last = asked.removeprefix("bytes=").partition("-")
            return int(first), min(int(last), length - 1) if last else length - 1

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
            pass

    return Handler
