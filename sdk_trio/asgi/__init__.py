"""The runtime for an application on asyncio: FastAPI, Starlette, Litestar, Django under uvicorn.

Two event loops in one process: the server's, and Trio's in a thread (docs/how-to/asyncio.md).
"""

from .threaded import Threaded, asyncio_loop

__all__ = ["Threaded", "asyncio_loop"]
