"""HTTP: the pages of the latest Report.  The daemon's tick writes `Published`, the server reads it."""

from .access import Access
from .addresses import ListenError
from .connections import Deadlines
from .published import Published
from .renewal import Renewal
from .server import HttpServer, serve_http

__all__ = ["Access", "Deadlines", "HttpServer", "ListenError", "Published", "Renewal", "serve_http"]
