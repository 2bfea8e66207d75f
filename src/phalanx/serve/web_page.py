"""The page at `/`: drop an image, see its prediction. All of it comes from this server.

`/model` tells it, and `phalanx request`, what the server has.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx.serve.service import Service, to_json_response

_FILES = {  # by address: the file and its media type
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_HEADERS = {
    # only the page's own files and images that it creates; no inline code, no frames
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src blob: data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _build_route(address: str, name: str, media_type: str) -> Route:
    content = Path(__file__).with_name(name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return Route(address, answer, methods=["GET"], include_in_schema=False)


routes = [_build_route(address, *file) for address, file in _FILES.items()]


def build_model_route(service: Service) -> Route:
    """The model's name, classes and limits."""
    metadata = service.metadata
    facts = {
        "name": service.name,
        "model": metadata.model,
        "weights": metadata.weights,
        "classes": metadata.classes,
        "image_size": metadata.preprocessing.image_size,
        "input": metadata.input,
        "has_activation_map": metadata.has_activation_map,
        "max_images": service.limits.max_images,  # per request
        "max_request_bytes": service.limits.max_request_bytes,
    }

    async def answer(request: Request) -> Response:
        return to_json_response(facts)

    return Route("/model", answer, methods=["GET"])
