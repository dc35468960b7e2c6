"""GET: what is served, how it is, and what it has done so far."""

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from dflash2_mlx.server.exchange import Desk
from dflash2_mlx.server.jsontext import JSONAnswer

NO_LIMIT = 2**31 - 1  # `pair.NO_LIMIT`, without the import that loads MLX


async def models(request: Request) -> Response:
    """The one model that is served."""
    return JSONAnswer({"object": "list", "data": [_model(request.app.state.desk)]})


async def model(request: Request) -> Response:
    """The same, asked for by one of its names."""
    desk: Desk = request.app.state.desk
    desk.check_model(request.path_params["name"])
    return JSONAnswer(_model(desk))


async def health(request: Request) -> Response:
    """200 while requests are answered or will be, 503 with the reason while not."""
    desk: Desk = request.app.state.desk
    state = desk.worker.health()
    about = desk.worker.about
    content: dict[str, Any] = {"status": "ok" if state.ok else "error", **asdict(state)}
    content["model"] = desk.model
    content["effective"] = None if about is None else asdict(about.effective)
    content["memory"] = _memory() | _planned(desk)
    return JSONAnswer(content, 200 if state.ok else 503)


async def metrics(request: Request) -> Response:
    """Counters and gauges, in Prometheus' text format."""
    worker = request.app.state.desk.worker
    state, memory = worker.health(), _memory()
    gauges = {
        "requests_running": ("Requests being answered.", float(state.running)),
        "requests_queued": ("Requests waiting.", float(state.queued)),
        "worker_ok": ("1 while the worker is alive and well.", float(state.ok)),
        "worker_restarts": ("Times the worker died.", float(state.restarts)),
        "memory_active_bytes": ("Memory in use by MLX.", float(memory["active_bytes"])),
        "memory_cache_bytes": ("Memory MLX keeps for later.", float(memory["cache_bytes"])),
        "memory_peak_bytes": ("Most memory of the last request.", float(memory["peak_bytes"])),
    }
    return PlainTextResponse(worker.tally.text(gauges), media_type="text/plain; version=0.0.4")


def _model(desk: Desk) -> dict[str, Any]:
    about = desk.worker.about
    described: dict[str, Any] = {
        "id": desk.model,
        "object": "model",
        "created": desk.started,
        "owned_by": "dflash2-mlx",
        "aliases": [*desk.names[1:], "default"],
    }
    if about is not None:
        limit = about.context_limit if about.context_limit < NO_LIMIT else None
        described |= {
            "context_length": limit,
            "max_model_len": limit,  # as vLLM names it
            "dflash": {**asdict(about.effective), "notes": list(about.notes)},
        }
    return described


def _planned(desk: Desk) -> dict[str, Any]:
    """The plan for the loaded pair, and what is kept of prompts."""
    guard = getattr(desk.worker.pair, "guard", None)
    return {} if guard is None else guard.told()


def _memory() -> dict[str, int]:
    import mlx.core as mx

    return {
        "active_bytes": mx.get_active_memory(),
        "cache_bytes": mx.get_cache_memory(),
        "peak_bytes": mx.get_peak_memory(),
    }
