"""The model as request handlers see it: its name, its limits and its outputs."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from phalanx.data.formats.image_file import DEFAULT_LIMITS, ReadLimits
from phalanx.export.metadata import ACTIVATION_MAP, LOGITS, ModelMetadata
from phalanx.serve.api_error import ApiError
from phalanx.serve.backend import Backend, PaddedModel
from phalanx.serve.batching import Batcher, BatchStats, JobTiming, Outputs, Reservation, Rows
from phalanx.serve.body import BodyReader
from phalanx.serve.images import ImageFile, ImagePreprocessor, PreprocessedImages
from phalanx.serve.metrics import Metrics

VERSION = "1"  # of the server's only model
FILES_INPUT = "image_bytes"  # an input for image files, besides the model's own
RECORD_KEY = "phalanx.record"  # in a request's scope, like the next two
CYCLE_KEY = "phalanx.cycle"
REFUSED_KEY = "phalanx.refused"  # status and reason, if the connection refused the request
_LARGE_JSON = 64 * 1024  # bytes; above, JSON is parsed in a thread
_BODIES_AT_ONCE = 4  # of the largest size, that fit into memory

_LOGGER = logging.getLogger("phalanx.serve")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """How much a client may send, and how long it may take."""

    max_batch: int = 8
    max_wait_s: float = 0.0
    max_queue: int = 64
    max_images: int = 256  # of one request
    max_request_bytes: int = 64 * 2**20
    max_connections: int = 1000
    header_s: float = 10.0  # from the first byte of a request to the end of its headers
    body_s: float = 30.0
    answer_s: float = 60.0
    keep_alive_s: float = 75.0
    drain_s: float = 30.0
    images: ReadLimits = DEFAULT_LIMITS


@dataclass
class RequestRecord:
    """The facts about a request, for the log."""

    images: int = 0
    decompressed_bytes: int = 0  # of its body
    decode_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    started_at: float = field(default_factory=time.perf_counter)
    error: str = ""

    def compute_timings_ms(self) -> dict[str, float]:
        """Milliseconds spent so far, by kind of work."""
        total_s = time.perf_counter() - self.started_at
        parts = {
            "decode": self.decode_s,
            "queue": self.queue_s,
            "compute": self.compute_s,
            "total": total_s,
        }
        return {name: round(1e3 * seconds, 3) for name, seconds in parts.items()}


class Service:
    """The model with its queue and threads, and everything else that handlers need."""

    def __init__(
        self, backends: Sequence[Backend], name: str, limits: ServeLimits, *, decode_threads: int
    ) -> None:
        self._backends, self.backend = backends, backends[0]
        self.name, self.limits = name, limits
        self.metadata: ModelMetadata = self.backend.metadata
        self.outputs = (LOGITS, *([ACTIVATION_MAP] * self.metadata.has_activation_map))
        self.metrics = Metrics()
        self.batcher = Batcher(
            max_batch=limits.max_batch,
            max_wait_s=limits.max_wait_s,
            max_queue=limits.max_queue,
            on_batch=self._count_batch,
        )
        self.bodies = BodyReader(
            max_bytes=limits.max_request_bytes,
            max_s=limits.body_s,
            total_bytes=_BODIES_AT_ONCE * limits.max_request_bytes,
        )
        self.preprocessor = ImagePreprocessor(
            self.metadata.preprocessing,
            limits.images,
            threads=decode_threads,
            as_bytes="image" in self.backend.input_kinds,
        )
        # only one thread: parsing holds Python's lock, and a large body takes much memory
        self._parser_pool = ThreadPoolExecutor(1, thread_name_prefix="parse")
        self.ready = False
        self._add_gauges()

    def _add_gauges(self) -> None:
        self.metrics.add_gauge(
            "phalanx_waiting_images", "Images that no model has taken yet.",
            lambda: self.batcher.waiting,
        )  # fmt: skip
        self.metrics.add_gauge("phalanx_ready", "1 when requests are answered.", lambda: self.ready)
        self.metrics.add_gauge(
            "phalanx_model_info",
            "The model.",
            lambda: 1,
            {
                "name": self.name,
                "model": self.metadata.model,
                "runtime": self.backend.runtime,
                "preprocessing": self.metadata.preprocessing.fingerprint[:12],
            },
        )

    def _count_batch(self, stats: BatchStats) -> None:
        self.metrics.batch_images.observe(stats.images)
        self.metrics.batch_s.observe(stats.run_s)
        if stats.failed:
            self.metrics.failures.add()
        else:
            self.metrics.images.add(amount=stats.images)

    def start(self) -> None:
        """Warm up all models and the decoders."""
        self.preprocessor.warm_up()
        self.batcher.start([PaddedModel(one, self.limits.max_batch) for one in self._backends])

    def close(self) -> None:
        """Stop all threads."""
        self.batcher.close()
        self.preprocessor.close()
        self._parser_pool.shutdown()

    # --- for handlers ---

    def refuse_other_model(self, request: Request) -> None:
        """Raise 404 for a model or version other than this server's."""
        name = request.path_params.get("name", self.name)
        version = request.path_params.get("version", VERSION)
        if name != self.name:
            raise ApiError(404, f"no model is called {name[:60]!r}; this server has {self.name!r}")
        if version != VERSION:
            raise ApiError(
                404, f"{self.name} has no version {version[:60]!r}; its only one is {VERSION}"
            )

    def refuse_image_count(self, images: int) -> None:
        """Raise ApiError for a request without images, or with too many."""
        if not images:
            raise ApiError(400, "no image was sent; send at least one")
        if images > self.limits.max_images:
            raise ApiError(
                413,
                f"{images:,} images in one request, the limit of --max-images is "
                f"{self.limits.max_images:,}; send them in several",
            )

    async def read_body(
        self,
        request: Request,
        read: Callable[[bytes], _Result],
        measure_json: Callable[[bytes], int] = lambda body: 0,
    ) -> _Result:
        """The result of `read` for the body; in a thread if it is compressed or much JSON."""
        # a stopping server still accepts requests: only its health probes report that it stops
        self.batcher.refuse_full()
        body = await self.bodies.read(request)
        encoding = request.headers.get("content-encoding", "")
        if not encoding:
            is_large = measure_json(body) > _LARGE_JSON
            return await self.run_in_thread(read, body) if is_large else read(body)
        record: RequestRecord = request.scope[RECORD_KEY]

        def decompress_and_read() -> _Result:
            # in one call: few bytes may become many, so the next body waits until these are read
            content = self.bodies.decompress(body, encoding)
            record.decompressed_bytes = len(content)
            self.bodies.add_held_bytes(len(content))  # until the response is sent
            return read(content)

        return await self.run_in_thread(decompress_and_read)

    async def run_in_thread(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """The result of a function that takes long, without delaying other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._parser_pool, function, *args)

    async def classify(self, request: Request, images: Rows | list[ImageFile]) -> Outputs:
        """The model's outputs for rows in its own form, or for files that can all be read."""
        if isinstance(images, np.ndarray):
            return await self._classify_rows(request, images)
        outputs, prepared = await self.classify_files(request, images)
        for place, problem in prepared.problems.items():
            raise ApiError(400, f"{images[place].name}: {problem}")
        return outputs

    async def _classify_rows(self, request: Request, rows: Rows) -> Outputs:
        with self.batcher.reserve(len(rows)) as places:
            outputs = await self._run(request, places, rows)
        if not _are_finite(outputs) and rows.dtype == np.float32:
            raise ApiError(
                400,
                f"the model gives infinity or NaN for these values, which go from {rows.min():g} "
                f"to {rows.max():g}; send normalised pixels",
            )
        _refuse_infinite(outputs)
        return outputs

    async def classify_files(
        self, request: Request, images: Sequence[ImageFile]
    ) -> tuple[Outputs, PreprocessedImages]:
        """The model's outputs for the image files that can be read, in order."""
        record: RequestRecord = request.scope[RECORD_KEY]
        with self.batcher.reserve(len(images)) as places:
            began = time.perf_counter()
            prepared = await self.preprocessor.preprocess(images)
            record.decode_s = time.perf_counter() - began
            self.metrics.decode_s.observe(record.decode_s)
            if not len(prepared.rows):
                return {}, prepared
            outputs = await self._run(request, places, prepared.rows)
        _refuse_infinite(outputs)
        return outputs, prepared

    async def _run(self, request: Request, places: Reservation, rows: Rows) -> Outputs:
        record: RequestRecord = request.scope[RECORD_KEY]
        record.images = len(rows)
        cycle = request.scope.get(CYCLE_KEY)

        def is_abandoned() -> bool:
            return cycle is not None and cycle.disconnected

        timing: JobTiming
        try:
            async with asyncio.timeout(self.limits.answer_s):
                outputs, timing = await places.run(rows, is_abandoned)
        except TimeoutError:
            raise ApiError(
                503,
                f"no answer within {self.limits.answer_s:g} s; send it again later",
                headers={"Retry-After": "5"},
            ) from None
        record.queue_s, record.compute_s = timing
        self.metrics.queue_s.observe(timing.queue_s)
        return outputs


def _are_finite(outputs: Outputs) -> bool:
    return all(bool(np.isfinite(values).all()) for values in outputs.values())


def _refuse_infinite(outputs: Outputs) -> None:
    """Raise ApiError for outputs that are not finite, which JSON cannot represent."""
    if not _are_finite(outputs):
        what = "the model gives infinity or NaN for an image"
        _LOGGER.error("%s; its weights are damaged, or its precision is too low", what)
        raise ApiError(500, f"{what}: its weights are damaged, or its precision is too low")


def parse_object(body: bytes | memoryview) -> dict[str, Any]:
    """The body as a JSON object; raises ApiError if it is something else."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object, such as {...}")
    return found


def to_json_response(facts: object, status: int = 200) -> Response:
    """A response in JSON; numpy arrays become lists."""
    body = orjson.dumps(facts, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, media_type="application/json")
