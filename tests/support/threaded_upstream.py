"""An upstream on loopback in threads, from the standard library, for clients without a loop."""

import contextlib
import csv
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

ORDERS = [{"id": f"ord_{n}", "status": "paid", "total_amount": n} for n in range(7)]


class ThreadedUpstream(ThreadingHTTPServer):
    """Orders in pages, an export, answers of any status at ``/v1/status/N``, and silence.

    ``requests`` are method, path and query of all requests. ``silent`` counts clients that wait at
    ``/v1/silent``, and ``gone`` is set when one of them has disconnected.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str, dict[str, list[str]]]] = []
        self.silent = threading.Semaphore(0)
        self.gone = threading.Event()

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of a client's settings."""
        return {
            "Environment": "Development",
            "Mode": "Custom",
            "CustomBaseUrl": f"http://127.0.0.1:{self.server_port}",
            "AccessToken": "not-a-real-token",
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ThreadedUpstream

    def log_message(self, *_: object) -> None: ...

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # a client that disconnects
            super().handle()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        length = int(self.headers.get("Content-Length", 0))
        self.rfile.read(length)
        self.server.requests.append((self.command, url.path, query))
        path = url.path.removeprefix("/v1")
        if path == "/silent":
            self.server.silent.release()
            self.rfile.read(1)
            self.server.gone.set()
            self.close_connection = True
        elif path.startswith("/status/"):
            self._answer(int(path.rpartition("/")[2]), {"error": "Sad", "detail": "as asked"})
        elif path == "/orders/export":
            self._export()
        elif path == "/orders/" and self.command == "GET":
            limit, page = int(query["limit"][0]), int(query["page"][0])
            pages = -(-len(ORDERS) // limit)
            items = ORDERS[(page - 1) * limit : page * limit]
            count = {"total_count": len(ORDERS), "max_page": pages}
            self._answer(200, {"items": items, "pagination": count})
        elif path.startswith("/orders/ord_"):
            self._answer(200, {"id": path.rpartition("/")[2], "status": "brand_new", "new": 1})
        elif path.startswith("/products/"):
            self._answer(204, None)
        else:
            self._answer(404, {"error": "ResourceNotFound", "detail": "Not found"})

    do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815 - the names of the base

    def _answer(self, status: int, document: object) -> None:
        body = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _export(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/csv")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for rows in (["id,amount"], ["ord_1,1", "ord_2,2"], ["ord_3,3"]):
            text = io.StringIO()
            csv.writer(text).writerows(row.split(",") for row in rows)
            data = text.getvalue().encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


@contextlib.contextmanager
def threaded_upstream() -> Iterator[ThreadedUpstream]:
    """Serve on a free port for the length of the block."""
    with ThreadedUpstream() as upstream:
        thread = threading.Thread(target=upstream.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield upstream
        finally:
            upstream.shutdown()
            thread.join()
