"""HTTP: the pages of the latest Report.  The daemon's tick writes `Published`, the server reads it."""

from .published import Published
from .server import Deadlines, HttpServer, ListenError, serve_http

__all__ = ["Deadlines", "HttpServer", "ListenError", "Published", "serve_http"]
