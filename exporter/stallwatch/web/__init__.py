"""HTTP: the pages of the latest Report.  The daemon's tick writes `Published`, the server reads it."""

from .addresses import ListenError
from .connections import Deadlines
from .published import Published
from .server import HttpServer, serve_http

__all__ = ["Deadlines", "HttpServer", "ListenError", "Published", "serve_http"]
