"""The OpenAPI document of a service."""

from typing import Any, get_args

from phalanx import __version__
from phalanx.export.metadata import INPUT_NAMES, WeightsKind
from phalanx.serve.backend import SHAPES
from phalanx.serve.service import FILES_INPUT, VERSION, Service

_Schema = dict[str, Any]
_ERRORS = {
    "400": "The request is invalid; the message says why.",
    "401": "The server has a key, and none or another was sent.",
    "404": "Another model or version than the one here.",
    "408": "The body took too long.",
    "413": "Too large: the body, or the number of images.",
    "415": "A Content-Type or Content-Encoding that is not known.",
    "429": "Too many images are waiting; Retry-After says when to come again.",
    "503": "The model takes too long, or cannot answer any more.",
}
_TEXT: _Schema = {"type": "string"}
_NUMBER: _Schema = {"type": "number"}


def _refer(name: str) -> _Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict[str, _Schema], *, optional: tuple[str, ...] = ()) -> _Schema:
    """An object with these properties, of which some may be missing."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list_of(items: _Schema, count: int | None = None) -> _Schema:
    limits = {} if count is None else {"minItems": count, "maxItems": count}
    return {"type": "array", "items": items, **limits}


def _answer(schema: _Schema, what: str = "The answer.") -> _Schema:
    return {"description": what, "content": {"application/json": {"schema": schema}}}


def _errors(*statuses: str) -> _Schema:
    return {
        status: {
            **_answer(_refer("Error"), _ERRORS[status]),
            **({"headers": {"Retry-After": {"schema": _TEXT}}} if status in ("429", "503") else {}),
        }
        for status in statuses
    }


def _sample(command: str) -> list[_Schema]:
    return [{"lang": "Shell", "source": command}]


def build_openapi(service: Service, *, url: str, needs_key: bool) -> _Schema:
    """The API as an OpenAPI 3.1 document; url: that of the server."""
    document: _Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": f"Phalanx: {service.name}",
            "version": __version__,
            "summary": f"{service.metadata.model}, {len(service.metadata.classes):,} classes, "
            f"images of {service.metadata.preprocessing.image_size} pixels",
        },
        "paths": {
            **_describe_predict(service, url),
            **_describe_tensorflow(service, url),
            **_describe_protocol(service, url),
            **_describe_own(),
        },
        "components": {"schemas": _describe_schemas(service)},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = [{"bearer": []}, {"header": []}]
        for path in ("/health", "/v2/health/live", "/v2/health/ready"):
            document["paths"][path]["get"]["security"] = []
    return document


def _describe_schemas(service: Service) -> dict[str, _Schema]:
    classes = len(service.metadata.classes)
    logits = _list_of(_NUMBER, classes)
    guess = _object({"class": _TEXT, "probability": _NUMBER})
    prediction = _object(
        {
            "image": _TEXT,
            "guesses": _list_of(guess),
            "problem": {**_TEXT, "description": "Why the image cannot be read."},
            "seen": {**_TEXT, "description": "The image as the network saw it, a data URL."},
            "activation_map": _list_of(_list_of(_NUMBER)),
        },
        optional=("problem", "seen", "activation_map"),
    )
    timing = _object(dict.fromkeys(("decode", "queue", "compute", "total"), _NUMBER))
    tensor = _object(
        {
            "name": _TEXT,
            "datatype": _TEXT,
            "shape": _list_of({"type": "integer"}),
            "parameters": {"type": "object"},
            "data": {"type": "array"},
        },
        optional=("parameters", "data"),
    )
    return {
        "Error": _object({"error": {**_TEXT, "description": "What is wrong, and how to fix it."}}),
        "Predictions": _object(
            {"model": _TEXT, "predictions": _list_of(prediction), "timing_ms": timing}
        ),
        "Logits": logits,
        "Tensor": tensor,
    }


def _describe_predict(service: Service, url: str) -> dict[str, _Schema]:
    classes = len(service.metadata.classes)
    file = {"type": "string", "format": "binary"}
    # not also as lists of files: tools then refuse other types, which a form does not have
    form = {"type": "object", "minProperties": 1, "additionalProperties": file}  # any names
    top = {"type": "integer", "minimum": 1, "maximum": classes, "default": min(5, classes)}
    operation = {
        "summary": "The most likely classes of an image, or of several",
        "description": "Send one file as the body, or several as a form; the names of the form's "
        "fields do not matter, and several files may have the same. Of several images, one that "
        "cannot be read has a problem instead of classes; one alone is refused with 400.",
        "parameters": [
            {"name": "top", "in": "query", "description": "How many classes.", "schema": top},
            {
                "name": "details",
                "in": "query",
                "description": "Add the image as the network saw it, and where it saw the class.",
                "schema": {"type": "boolean", "default": False},
            },
        ],
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {"schema": form},
                "application/octet-stream": {"schema": file},
                "image/jpeg": {"schema": file},
                "image/png": {"schema": file},
            },
        },
        "responses": {
            "200": _answer(_refer("Predictions")),
            **_errors("400", "401", "408", "413", "415", "429", "503"),
        },
        "x-codeSamples": _sample(f"curl -F image=@shoe.png {url}predict"),
    }
    return {"/predict": {"post": operation}}


def _list_places(service: Service, protocol: str) -> list[tuple[str, _Schema]]:
    """The paths of the model, without and with its version, and what is common to their methods."""
    path, parameters, places = f"/{protocol}/models", list[_Schema](), []
    for end, name, value in (("", "name", service.name), ("/versions", "version", VERSION)):
        path += f"{end}/{{{name}}}"
        known = {"type": "string", "enum": [value]}
        parameters.append({"name": name, "in": "path", "required": True, "schema": known})
        places.append((path, {"parameters": [*parameters]}))
    return places


def _describe_instances(service: Service) -> _Schema:
    """The body of TensorFlow Serving's :predict."""
    size = service.metadata.preprocessing.image_size
    encoded = {
        **_object({"b64": {**_TEXT, "contentEncoding": "base64", "pattern": "^[A-Za-z0-9+/]*=*$"}}),
        "additionalProperties": False,
    }
    # no sizes in the schema: tools that generate examples would take minutes for each
    array = _list_of(_list_of(_list_of(_NUMBER)))
    shapes = [f"{list(SHAPES['image'](size))} of pixels from 0 to 255"]
    if "tensor" in service.backend.input_kinds:
        shapes.append(f"{list(SHAPES['tensor'](size))} of normalised ones")
    images = {
        "anyOf": [{**_list_of(kind), "minItems": 1} for kind in (encoded, array)],
        "description": f"Image files in base64, or arrays: {', or '.join(shapes)}.",
    }
    return {
        "type": "object",
        "properties": {
            "signature_name": {"type": "string", "enum": ["serving_default"]},
            "instances": images,
            "inputs": images,
        },
        "oneOf": [{"required": ["instances"]}, {"required": ["inputs"]}],
    }


def _describe_tensorflow(service: Service, url: str) -> dict[str, _Schema]:
    """The REST interface of TensorFlow Serving."""
    body = _describe_instances(service)
    both = {"predictions": _list_of(_refer("Logits")), "outputs": _list_of(_refer("Logits"))}
    answered = _object(both, optional=tuple(both))
    paths: dict[str, _Schema] = {}
    for place, shared in _list_places(service, "v1"):
        paths[place] = {
            **shared,
            "get": {
                "summary": "Whether the model is ready (TensorFlow Serving)",
                "responses": {"200": _answer({"type": "object"}), **_errors("401", "404")},
            },
        }
        paths[f"{place}/metadata"] = {
            **shared,
            "get": {
                "summary": "What the model takes and gives (TensorFlow Serving)",
                "responses": {"200": _answer({"type": "object"}), **_errors("401", "404")},
            },
        }
        paths[f"{place}:predict"] = {
            **shared,
            "post": {
                "summary": "Logits of images (TensorFlow Serving)",
                "description": 'Row by row ("instances") or as one array ("inputs").',
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": body}},
                },
                "responses": {
                    "200": _answer(answered),
                    **_errors("400", "401", "404", "408", "413", "415", "429", "503"),
                },
                "x-codeSamples": _sample(
                    'echo "{\\"instances\\": [{\\"b64\\": \\"$(base64 -w0 shoe.png)\\"}]}" |\n'
                    "  curl --data-binary @- "
                    f"{url}v1/models/{service.name}:predict"
                ),
            },
        }
    return paths


def _describe_tensors(service: Service) -> tuple[_Schema, _Schema]:
    """The bodies of an inference request and its response."""
    own = [INPUT_NAMES[kind] for kind in service.backend.input_kinds]
    given = _object(
        {
            "name": {"type": "string", "enum": [*own, FILES_INPUT]},
            "datatype": {"type": "string", "enum": ["FP32", "UINT8", "BYTES"]},
            "shape": {**_list_of({"type": "integer", "minimum": 1}), "minItems": 1},
            "parameters": {"type": "object"},
            "data": {"type": "array"},
        },
        optional=("parameters", "data"),
    )
    body = _object(
        {"id": _TEXT, "inputs": _list_of(given, 1), "outputs": _list_of(_object({"name": _TEXT}))},
        optional=("id", "outputs"),
    )
    answered = _object(
        {
            "model_name": _TEXT,
            "model_version": _TEXT,
            "id": _TEXT,
            "outputs": _list_of(_refer("Tensor")),
        },
        optional=("id",),
    )
    return body, answered


def _describe_infer(service: Service, url: str) -> _Schema:
    body, answered = _describe_tensors(service)
    return {
        "summary": "Outputs for inputs (Open Inference Protocol)",
        "description": "Tensors are in the JSON, or binary after it: then the header "
        f"Inference-Header-Content-Length has the length of the JSON. {FILES_INPUT}: image "
        "files, BYTES of [N], in JSON as base64.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": "The answer; application/octet-stream where binary outputs were "
                "asked for.",
                "content": {
                    "application/json": {"schema": answered},
                    "application/octet-stream": {},
                },
            },
            **_errors("400", "401", "404", "408", "413", "415", "429", "503"),
        },
        "x-codeSamples": _sample(
            f'curl {url}v2/models/{service.name}/infer -d \'{{"inputs": '
            f'[{{"name": "{FILES_INPUT}", "datatype": "BYTES", "shape": [1], "data": '
            "[\"'$(base64 -w0 shoe.png)'\"]}]}'"
        ),
    }


def _describe_protocol(service: Service, url: str) -> dict[str, _Schema]:
    """The Open Inference Protocol."""
    described = _answer({"type": "object"})
    not_ready = {"503": _answer({"type": "object"}, "Not ready.")}
    plain = {"200": described, **_errors("401")}
    found = {**plain, **_errors("404")}
    health = {"200": described, **not_ready}
    paths: dict[str, _Schema] = {
        "/v2": {"get": {"summary": "The server (Open Inference Protocol)", "responses": plain}},
        "/v2/health/live": {"get": {"summary": "Whether it runs", "responses": {"200": described}}},
        "/v2/health/ready": {"get": {"summary": "Whether it answers", "responses": health}},
    }
    operations = {
        "": {"get": {"summary": "What the model takes and gives", "responses": found}},
        "/ready": {
            "get": {"summary": "Whether the model answers", "responses": {**found, **not_ready}}
        },
        "/infer": {"post": _describe_infer(service, url)},
    }
    for place, shared in _list_places(service, "v2"):
        paths |= {f"{place}{end}": {**shared, **one} for end, one in operations.items()}
    return paths


def _describe_own() -> dict[str, _Schema]:
    ready = {"200": _answer({"type": "object"}), "503": _answer({"type": "object"}, "Stopping.")}
    text = {"description": "Text.", "content": {"text/plain": {"schema": _TEXT}}}
    model = _object(
        {
            "name": _TEXT,
            "model": _TEXT,
            "weights": {"enum": [*get_args(WeightsKind)]},
            "classes": _list_of(_TEXT),
            "image_size": {"type": "integer"},
            "input": {"enum": [*INPUT_NAMES]},
            "has_activation_map": {"type": "boolean"},
            "max_images": {"type": "integer"},
            "max_request_bytes": {"type": "integer"},
        }
    )
    return {
        "/health": {"get": {"summary": "Whether requests are answered", "responses": ready}},
        "/model": {
            "get": {
                "summary": "Which model this server has, and the names of its classes",
                "responses": {"200": _answer(model), **_errors("401")},
            }
        },
        "/metrics": {
            "get": {
                "summary": "Counters for Prometheus",
                "responses": {"200": text, **_errors("401")},
            }
        },
    }
