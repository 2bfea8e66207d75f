"""POST /predict: from image files to the most likely classes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phalanx.data.formats.decode import encode_png
from phalanx.errors import suggest
from phalanx.export.metadata import ACTIVATION_MAP, LOGITS
from phalanx.report.html import embed_file
from phalanx.serve.api_error import ApiError
from phalanx.serve.batching import Outputs
from phalanx.serve.body import find_boundary, split_multipart
from phalanx.serve.images import ImageFile, PreprocessedImages
from phalanx.serve.service import RECORD_KEY, Service, to_json_response

_DEFAULT_TOP = 5
_PARAMETERS = ("top", "details")
_SWITCH = {"true": True, "1": True, "false": False, "0": False}


class PredictApi:
    """Our own protocol: one file, or several as sent by a form."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.routes = [Route("/predict", self._predict, methods=["POST"])]

    async def _predict(self, request: Request) -> Response:
        service = self._service
        top, details = self._read_query(request)
        kind = request.headers.get("content-type", "application/octet-stream")
        _refuse_content_type(kind)
        images = await service.read_body(request, lambda body: self._find_images(kind, body))
        service.refuse_image_count(len(images))
        outputs, prepared = await service.classify_files(request, images)
        if len(images) == 1 and prepared.problems:
            raise ApiError(400, f"{images[0].name}: {prepared.problems[0]}")
        predictions = self._describe(images, outputs, prepared, top)
        if details:
            await service.run_in_thread(_add_details, predictions, outputs, prepared)
        timing = request.scope[RECORD_KEY].compute_timings_ms()
        return to_json_response(
            {"model": service.name, "predictions": predictions, "timing_ms": timing}
        )

    def _read_query(self, request: Request) -> tuple[int, bool]:
        """How many classes to name, and whether to add the details that the page shows."""
        for name in request.query_params:
            if name not in _PARAMETERS:
                known = suggest(name[:60], _PARAMETERS)
                raise ApiError(400, f"{name[:60]!r}: no such parameter; {known}")
        classes = len(self._service.metadata.classes)
        text = request.query_params.get("top", str(min(_DEFAULT_TOP, classes)))
        if not (
            text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= classes
        ):
            raise ApiError(400, f"top: expected a number from 1 to {classes:,}, got {text[:60]!r}")
        details = request.query_params.get("details", "false").lower()
        if details not in _SWITCH:
            raise ApiError(400, f"details: expected true or false, got {details[:60]!r}")
        return int(text), _SWITCH[details]

    def _find_images(self, kind: str, body: bytes) -> list[ImageFile]:
        if not kind.lower().startswith("multipart/form-data"):
            return [ImageFile("image", body)]
        boundary, most = find_boundary(kind), self._service.limits.max_images
        return split_multipart(body, boundary, most=most)

    def _describe(
        self, images: list[ImageFile], outputs: Outputs, prepared: PreprocessedImages, top: int
    ) -> list[dict[str, Any]]:
        """A prediction for each image, in order."""
        names, predictions, row = self._service.metadata.classes, list[dict[str, Any]](), 0
        for place, image in enumerate(images):
            if place in prepared.problems:
                problem = prepared.problems[place]
                predictions.append({"image": image.name, "guesses": [], "problem": problem})
                continue
            shares = _softmax(outputs[LOGITS][row])
            best = np.argsort(-shares, kind="stable")[:top]
            guesses = [{"class": names[at], "probability": float(shares[at])} for at in best]
            predictions.append({"image": image.name, "guesses": guesses})
            row += 1
        return predictions


def _refuse_content_type(kind: str) -> None:
    plain = kind.partition(";")[0].strip().lower()
    known = ("application/octet-stream", "multipart/form-data", "binary/octet-stream")
    if plain in known or plain.startswith("image/"):
        return
    raise ApiError(
        415,
        f"Content-Type {plain[:60]!r} is not an image: send a file as image/jpeg, image/png or "
        "application/octet-stream, or files as multipart/form-data (curl -F image=@FILE)",
    )


def _softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Probabilities of one image's logits."""
    powers = np.exp(logits.astype(np.float64) - logits.max())
    shares: NDArray[np.float64] = powers / powers.sum()
    return shares


def _add_details(
    predictions: list[dict[str, Any]], outputs: Outputs, prepared: PreprocessedImages
) -> None:
    """Add what the page shows: the image as the network saw it, and its activation map."""
    row = 0
    for place, prediction in enumerate(predictions):
        if place in prepared.problems:
            continue
        prediction["seen"] = embed_file(encode_png(prepared.pixels[place]), "PNG")
        if ACTIVATION_MAP in outputs:
            prediction["activation_map"] = _scale_map(outputs[ACTIVATION_MAP][row])
        row += 1


def _scale_map(values: NDArray[Any]) -> Any:
    """A map scaled to 0..1; all zeros if it is flat."""
    low, high = float(values.min()), float(values.max())
    if not 0 < high - low < float("inf"):
        return np.zeros(values.shape).tolist()
    return ((values - low) / (high - low)).round(4).tolist()
