"""The application: routes, API key, format of errors, request log and counters."""

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.serve.api_error import ApiError, ClientDisconnected
from phalanx.serve.docs_page import build_docs_page
from phalanx.serve.metrics import CONTENT_TYPE
from phalanx.serve.open_inference_api import OpenInferenceApi
from phalanx.serve.openapi import build_openapi
from phalanx.serve.predict_api import PredictApi
from phalanx.serve.service import RECORD_KEY, REFUSED_KEY, RequestRecord, Service, to_json_response
from phalanx.serve.tensorflow_api import TensorflowApi
from phalanx.serve.web_page import build_model_route
from phalanx.serve.web_page import routes as page_routes

_LOGGER = logging.getLogger("phalanx.serve")
_OPEN_PATHS = ("/health", "/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs")
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
_CLIENT_CLOSED_REQUEST = 499  # never sent: what logs say of a request whose client has disconnected
_PATH_SHOWN = 200
_NO_ROUTE = "other"  # the route of all unknown paths, in counters
_DOCS_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
WriteLogLine = Callable[[bytes], None]  # appends a line to the log


def build_app(
    service: Service, *, url: str, api_key: str, log: WriteLogLine | None
) -> "RequestMiddleware":
    """All routes of a service; url: its address; api_key: the key clients must send, if any."""
    routes = [
        *PredictApi(service).routes,
        *TensorflowApi(service).routes,
        *OpenInferenceApi(service).routes,
        *_build_own_routes(service, url=url, needs_key=bool(api_key)),
        build_model_route(service),
        *page_routes,
    ]
    handlers: Any = {ApiError: _describe_api_error, HTTPException: _describe_http_error}
    inner = ExceptionMiddleware(Router(routes, redirect_slashes=False), handlers)
    open_paths = {*_OPEN_PATHS, *(route.path for route in page_routes)}
    # of an endpoint with several paths, the shortest
    names = {route.endpoint: route.path_format for route in reversed(routes)}
    return RequestMiddleware(inner, service, names, open_paths, api_key=api_key, log=log)


def _build_own_routes(service: Service, *, url: str, needs_key: bool) -> list[Route]:
    """Health, metrics and documentation."""
    document = build_openapi(service, url=url, needs_key=needs_key)
    page = build_docs_page(document)

    async def health(request: Request) -> Response:
        status = "ready" if service.ready else "stopping"
        return to_json_response({"status": status}, 200 if service.ready else 503)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(request: Request) -> Response:
        return to_json_response(document)

    async def docs(request: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _DOCS_POLICY})

    return [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
        Route("/docs", docs),
    ]


async def _describe_api_error(request: Request, error: ApiError) -> Response:
    answer = to_json_response({"error": error.message}, error.status)
    answer.headers.update(error.headers)
    request.scope[RECORD_KEY].error = error.message
    return answer


async def _describe_http_error(request: Request, error: HTTPException) -> Response:
    """An unknown path or method, in the format of all errors."""
    path = request.scope["path"][:_PATH_SHOWN]
    texts = {
        404: f"nothing is at {path}; /docs lists what there is",
        405: f"{path} does not take {request.method[:20]}",
    }
    answer = to_json_response(
        {"error": texts.get(error.status_code, error.detail)}, error.status_code
    )
    answer.headers.update(error.headers or {})
    return answer


class RequestMiddleware:
    """Wraps all routes: checks the API key, and logs and counts every request.

    An unexpected exception is a bug of the server: the client gets 500, the log the traceback.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        names: dict[Any, str],
        open_paths: set[str],
        *,
        api_key: str,
        log: WriteLogLine | None,
    ) -> None:
        self._app, self._service, self._log = app, service, log
        self._names = names  # of routes, by their handlers
        self._key, self._open_paths = api_key.encode(), open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            return
        record = scope[RECORD_KEY] = RequestRecord()
        scope["app"] = self  # without an app, starlette's routes would respond to errors themselves
        status, sent = 0, 0

        async def count_and_send(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            if self._key and not self._is_allowed(scope):
                await _refuse_key(scope, receive, count_and_send)
            else:
                await self._app(scope, receive, count_and_send)
        except ClientDisconnected:
            status = _CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:  # of what is left after --drain-seconds
            record.error = "the server has stopped"
            if not status:
                answer = to_json_response({"error": f"{record.error}; send it again"}, 503)
                answer.headers.update({"Retry-After": "5", "Connection": "close"})
                await answer(scope, receive, count_and_send)
        except Exception as error:
            _LOGGER.error(
                "%s %s failed", scope["method"], scope["path"][:_PATH_SHOWN], exc_info=error
            )
            record.error = f"{type(error).__name__}: {error}"
            if not status:
                answer = to_json_response({"error": "the server failed; its log says why"}, 500)
                await answer(scope, receive, count_and_send)
        finally:
            self._service.bodies.add_held_bytes(-record.decompressed_bytes)
        status, record.error = scope.get(REFUSED_KEY, (status, record.error))
        self._record_request(scope, record, status, sent)

    def record_refusal(
        self, client: tuple[str, int] | None, path: str, status: int, why: str
    ) -> None:
        """Count and log a request that the connection refused before it could be handled."""
        scope = {"method": "", "path": path, "client": client}
        self._record_request(scope, RequestRecord(error=why), status, 0)

    def _is_allowed(self, scope: Scope) -> bool:
        """Whether a request needs no key, or has the right one."""
        if scope["path"] in self._open_paths:
            return True
        for name, value in scope["headers"]:
            if name == b"x-api-key" and hmac.compare_digest(value, self._key):
                return True
            if name == b"authorization":
                kind, _, given = value.partition(b" ")
                if kind.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key):
                    return True
        return False

    def _record_request(self, scope: Scope, record: RequestRecord, status: int, sent: int) -> None:
        """Count the request, and write its line to the log."""
        took_s = time.perf_counter() - record.started_at
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = self._names.get(scope.get("endpoint"), _NO_ROUTE)
        self._service.metrics.requests.add(route, method, str(status))
        self._service.metrics.request_s.observe(took_s, route)
        if self._log is None:
            return
        client = scope.get("client") or ("", 0)
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "Z",
            "client": client[0],
            "method": scope["method"][:20],
            "path": scope["path"][:_PATH_SHOWN],
            "status": status,
            "bytes": sent,
            "images": record.images,
            "ms": record.compute_timings_ms(),
        }
        if record.error:
            line["error"] = record.error
        self._log(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


async def _refuse_key(scope: Scope, receive: Receive, send: Send) -> None:
    answer = to_json_response(
        {
            "error": "this server needs its key: send the header Authorization: Bearer KEY, "
            "or X-API-Key: KEY"
        },
        401,
    )
    answer.headers["WWW-Authenticate"] = "Bearer"
    await answer(scope, receive, send)
